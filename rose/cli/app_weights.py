"""What `rose weights` takes. Like `app`, it imports nothing before the command is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rose.cli.app_options import COUNT_MAX, JsonOption

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a weight store.")]
_VERSION_MAX = 2**63 - 1

weights = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@weights.callback()
def _weights() -> None:
    """Look into a weight store: versions, damage, changes.

    The store may be in use; nothing is written to it.

    \b
    Examples:
      rose weights ls /data/weights             versions, and what it takes to get them
      rose weights verify /data/weights         read everything; status 1 if something is wrong
      rose weights diff /data/weights 6 7       which parameters changed most
    """


@weights.command("ls")
def weights_ls(folder: FolderArgument, json: JsonOption = False) -> None:
    """List the versions and what leads to them."""
    from rose.cli.weights import list_command

    list_command(folder, as_json=json)


@weights.command("verify")
def weights_verify(folder: FolderArgument, json: JsonOption = False) -> None:
    """Read everything and say what is wrong.

    Ends with status 1 if something is. Takes as long as reading all deltas and rebuilding all versions.
    """
    from rose.cli.weights import verify_command

    verify_command(folder, as_json=json)


@weights.command("diff")
def weights_diff(
    folder: FolderArgument,
    old: Annotated[int, typer.Argument(metavar="OLD", min=0, max=_VERSION_MAX, help="Version to start from.")],
    new: Annotated[int, typer.Argument(metavar="NEW", min=0, max=_VERSION_MAX, help="Version to compare it with.")],
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, max=COUNT_MAX, help="Parameters to show; 0 for all.")
    ] = 20,
    json: JsonOption = False,
) -> None:
    """Count the elements that changed, by parameter.

    Those with most changes come first.
    """
    from rose.cli.weights import diff_command

    diff_command(folder, old, new, limit=limit, as_json=json)
