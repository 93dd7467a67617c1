"""Options that several commands of `rose` take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder for output folders, in place of run.out.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the whole job and check this machine; run nothing.")
]
PlainOption = Annotated[bool, typer.Option("--plain", help="One line per step in place of the live view.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
COUNT_MAX = 10**9
