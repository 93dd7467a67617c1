"""The `rose` command: how it begins and how its errors end the process.

Exit status: 0 done; 1 something failed; 2 the job file or a flag is wrong; 3 the machine lacks something;
130 interrupted. A traceback is shown only with --debug. Nothing heavy is imported here, so that from the first moment
Ctrl-C finds somebody who knows what it means.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rose.errors import RoseError

INTERRUPTED_STATUS = 130
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main() -> None:
    """Entry point of the `rose` command."""
    try:
        _call()
    except KeyboardInterrupt:  # while it still imports; later on, commands see to it themselves
        sys.exit(INTERRUPTED_STATUS)


def _call() -> None:
    from rose.cli.app import Shown, app
    from rose.errors import ClusterError, RoseError

    try:
        try:
            app(prog_name="rose")
        finally:
            _flush()
    except Exception as error:  # the last stop: what comes here is told, and ends the process
        if Shown.traceback:
            raise
        if isinstance(error, OSError) and error.errno in _NO_ROOM and error.filename is None:
            to_do = "free some space, or send the output elsewhere"
            error = ClusterError(f"the output cannot be written: {error.strerror}", to_do=to_do)
        if isinstance(error, RoseError):
            _end(error_lines(error), _exit_status(error))
        # Whatever else comes here is a fault of ours, and says so.
        text = f"a fault of rose itself: {type(error).__name__}: {error}"
        _end(f"{text}\n  to do:    run it again as `rose --debug ...` and report what it shows", 1)


def _flush() -> None:
    """Have what is still to be written fail here, where it is told, and not when the interpreter ends."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # who reads has seen enough
            sys.exit(1)
        raise


def error_lines(error: RoseError) -> str:
    """What happened, what was expected, what to do: a line each, those that are known."""
    lines = [f"{error.boundary}: {error.what}"]
    if error.expected:
        lines.append(f"  expected: {error.expected}")
    if error.to_do:
        lines.append(f"  to do:    {error.to_do}")
    return "\n".join(lines)


def _exit_status(error: RoseError) -> int:
    from rose.errors import ClusterError, ConfigError

    return {ConfigError: 2, ClusterError: 3}.get(type(error), 1)


def _end(text: str, status: int) -> NoReturn:
    import typer

    with suppress(OSError):  # the reader may have gone, and the status says it too
        typer.echo(text, err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
