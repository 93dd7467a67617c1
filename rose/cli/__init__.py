"""Commands and the terminal view."""
