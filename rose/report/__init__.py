"""The end of a run: its report as data and as one page."""
