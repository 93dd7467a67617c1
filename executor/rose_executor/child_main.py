"""The first thing a launched process does: put guards between its launcher and itself, then become a module."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TextIO

from rose.processes import die_with_parent, forked_children_die_with_parent
from rose_executor.engine_env import MPS_DIRECTORY
from rose_executor.guard import guarded
from rose_executor.guest_groups import nothing_to_release


def run_module(parent_pid: int, module: str, arguments: Sequence[str]) -> int:
    """Run `module` as `__main__` in this process and return the exit code it asked for."""
    die_with_parent(parent_pid)
    forked_children_die_with_parent()
    sys.stdout, sys.stderr = _Lossy(sys.stdout), _Lossy(sys.stderr)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return end.code or 0
    except BaseException:  # noqa: BLE001 - nobody is left to raise to: the log and the exit code tell
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


class _Lossy(io.TextIOBase):
    """A log that may be full: what cannot be written is lost, and the engine goes on."""

    def __init__(self, log: TextIO) -> None:
        self._log = log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._log.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()

    def fileno(self) -> int:
        return self._log.fileno()

    def isatty(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._log.encoding


def _release() -> Callable[[Collection[int]], None]:
    """How this program leaves the device that it shares."""
    directory = os.environ.get(MPS_DIRECTORY)
    if directory is None:
        return nothing_to_release
    from rose_executor.mps_release import releasing

    return releasing(Path(directory))


if __name__ == "__main__":
    raise SystemExit(run_module(guarded(int(sys.argv[1]), _release()), sys.argv[2], sys.argv[3:]))
