"""When a process was born, by a clock that nobody sets: with its number, that is who it is for as long as it lives.

psutil's `create_time` is of the machine's date. When that is set anew every process on the machine has another one.
"""

from __future__ import annotations

from pathlib import Path

_START_TIME = 19
"""Of the fields behind the name, which may hold blanks and brackets itself; see proc_pid_stat(5)."""


def birth_ticks(pid: int) -> int:
    """Kernel ticks from the machine's start to the process's. Raises ProcessLookupError if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    return int(text.rpartition(b")")[2].split()[_START_TIME])
