"""The console that commands print to."""

from __future__ import annotations

from rich.console import Console

PIPED_COLUMNS = 120


def console() -> Console:
    """As wide as the terminal; wider than rich's 80 columns where there is none, so that tables stay readable."""
    made = Console()
    if not made.is_terminal:
        made.width = PIPED_COLUMNS
    return made
