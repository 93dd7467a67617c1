"""`python -m rose.trainer.cluster_main FOLDER NAME`: starts Ray, says its address, and ends with whoever started it.

Invariants
- When standard input ends, which it does however the starter dies, every process of Ray is ended, those too that
  outlive Ray's own end. They are killed, not asked: nothing that they hold outlives the run anyway.
- Standard output has one line of JSON, `{"address": ...}` or `{"error": ...}`; after an address a second one,
  `{"died": ...}`, if a process that Ray cannot do without dies, and then the end of everything.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any

import psutil

from rose.processes import become_subreaper, end_descendants

_ATTEMPTS = 5
_TOO_SLOW = "timed out during startup"
_OBJECT_STORE_BYTES = 128 * 2**20
"""Weights and trajectories on their way between two ranks."""
_NEEDED = ("gcs_server", "raylet")


def main(folder: str, name: str) -> None:
    """Start Ray with its files in `folder` and namespace `name`, and end it with standard input."""
    become_subreaper()
    for signum in (signal.SIGINT, signal.SIGHUP):  # of the terminal, meant for the starter
        signal.signal(signum, signal.SIG_IGN)
    try:
        started = _start(folder, name)
        _say(started)
        if "address" in started:
            died = _died()
            if died:
                _say({"died": died})
    finally:
        end_descendants(0)


def _start(folder: str, name: str) -> dict[str, str]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray

        started = _initiated(ray, folder, name)
        return {"address": started.address_info["gcs_address"]}
    except Exception as error:  # noqa: BLE001 -- told to whoever started this
        why = next(iter(str(error).splitlines()), "")[:300]
        return {"error": f"{type(error).__name__}: {why}"}


def _initiated(ray: Any, folder: str, name: str) -> Any:
    """Ray gives its node 30 s and no more, which a busy machine may not keep; each time more of it is cached.

    Whoever started this has a deadline for them all.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return ray.init(
                num_cpus=1,
                num_gpus=0,
                namespace=name,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
                _temp_dir=folder,
            )
        except Exception as error:
            ray.shutdown()
            end_descendants(0)
            if attempt == _ATTEMPTS or _TOO_SLOW not in str(error):
                raise
    raise AssertionError("the last attempt returns or raises")


def _died() -> str:
    """Wait until standard input ends, or a process that Ray cannot do without; the name of that one."""
    needed = {
        os.pidfd_open(child.pid): child.name() for child in psutil.Process().children() if child.name() in _NEEDED
    }
    over, _, _ = select.select([sys.stdin.fileno(), *needed], [], [])
    return next((needed[one] for one in over if one in needed), "")


def _say(what: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
