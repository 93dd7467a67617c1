"""The two folders of a run, and who may remove them.

- The *runtime* folder (`<root>/<run_id>/`, memory-backed where possible) holds sockets, pages, versions and
  the status; it lives exactly as long as the run. The *output* folder (`<out>/<run_id>/`) stays.
- A run is alive while somebody holds the exclusive lock on its `lock` file: the kernel frees it on any death.
- Runtime folders are made and swept only under the root's own lock, so a folder whose lock is free is dead.
- A folder is either whole or gone: what cannot be completed is removed before the error is raised.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rose.config import Job
from rose.errors import ClusterError, DeadlineExceeded
from rose.waits import WaitBoard

SOCKET_PATH_BYTES_MAX = 107
SOCKET_NAME_BYTES_MAX = 36
"""The engine's own processes name theirs by a UUID."""
ROOT_LOCK_TIMEOUT_S = 10.0
_POLL_S = 0.01
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]*-\d{8}-\d{6}-[0-9a-f]{4}")


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A runtime folder as a reader finds it; `alive` says that its lock is held."""

    run_id: str
    runtime: Path
    alive: bool


class Run:
    """An open run: its id, its two folders, and the lock that says it lives. Made by `open_run` and `open_service`.

    A child that is forked without exec shares the lock: the run then lives until that child has ended too.
    """

    def __init__(self, run_id: str, runtime: Path, output: Path, lock_fd: int) -> None:
        self.run_id = run_id
        self.runtime = runtime
        self.output = output
        self._lock_fd: int | None = lock_fd

    def socket_path(self, name: str) -> Path:
        """Where a unix socket of this run goes.

        Raises ClusterError if the path is longer than a socket address holds.
        """
        return _checked_socket(self.runtime, name)

    def close(self) -> None:
        """Remove the runtime folder and let go of the lock; the output folder stays. Safe to call twice.

        Raises ClusterError if the folder cannot be removed; the lock is free even then, so a later sweep retries.
        """
        if self._lock_fd is None:
            return
        fd, self._lock_fd = self._lock_fd, None
        try:
            _remove(self.runtime)
        finally:
            os.close(fd)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def runtime_root() -> Path:
    """Folder of all runtime folders of this user, made on first use with mode 0700.

    $ROSE_RUNTIME_DIR, else $XDG_RUNTIME_DIR/rose, else /dev/shm/rose-<uid>, else <tmp>/rose-<uid>.
    Raises ClusterError if it cannot be made, is not a folder, or if anyone else owns it or may look into it.
    """
    root = _root_path()
    with _disk(root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
        raise ClusterError(
            f"{root}: owner {found.st_uid}, mode {mode:04o}{'' if stat.S_ISDIR(found.st_mode) else ', not a folder'}",
            expected=f"a folder of user {os.getuid()} with mode 0700",
            to_do="chmod 700 it if it is yours, or set ROSE_RUNTIME_DIR to a folder that only you may use",
        )
    return root


def _root_path() -> Path:
    own = os.environ.get("ROSE_RUNTIME_DIR")
    if own:
        return Path(os.path.expanduser(own)).resolve()  # Path's own raises where there is no such home
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.access(session, os.W_OK | os.X_OK):  # left over from another user's login after `su`
        return Path(session) / "rose"
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"rose-{os.getuid()}"


def open_run(job: Job, waits: WaitBoard) -> Run:
    """`open_service` for a job; job.toml in its output says what it runs."""
    return open_service(job.run.name, job.run.out, waits, {"job.toml": job.to_toml()})


def open_service(name: str, out: Path, waits: WaitBoard, files: Mapping[str, str]) -> Run:
    """Sweep dead runs away, then make both folders of a new one; `files` are texts for its output folder, by name.

    Raises ClusterError, with the path and the free space, if a folder cannot be made; neither is left then.
    Raises DeadlineExceeded if another process holds the root's lock for longer than `ROOT_LOCK_TIMEOUT_S`.
    """
    root = runtime_root()
    began = f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    with _root_locked(root, waits):
        _sweep(root)
        with _disk(out):
            run_id = _free_id(began, root, out)
        runtime = root / run_id
        output = out / run_id
        _checked_socket(runtime, "x" * SOCKET_NAME_BYTES_MAX)
        fd: int | None = None
        try:
            with _disk(output):
                output.mkdir(parents=True)
                for file, text in files.items():
                    (output / file).write_text(text, encoding="utf-8")
            with _disk(runtime):
                runtime.mkdir(mode=0o700)
                fd = os.open(runtime / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _lock(fd, "lock of the new run", waits)
        except BaseException:
            shutil.rmtree(runtime, ignore_errors=True)
            shutil.rmtree(output, ignore_errors=True)
            if fd is not None:
                os.close(fd)
            raise
    return Run(run_id, runtime, output, fd)


def _free_id(began: str, root: Path, out: Path) -> str:
    """One that no folder has: runs that begin in the same second may draw the same number."""
    run_id = f"{began}-{secrets.token_hex(2)}"
    while (root / run_id).exists() or (out / run_id).exists():
        run_id = f"{began}-{secrets.token_hex(2)}"
    return run_id


def sweep(waits: WaitBoard) -> list[str]:
    """Remove the runtime folders of dead runs of this user; returns their ids. Live runs are never touched.

    Raises as `runtime_root` does, and DeadlineExceeded if the root's lock stays taken.
    """
    root = runtime_root()
    with _root_locked(root, waits):
        return _sweep(root)


def _sweep(root: Path) -> list[str]:
    dead = [run for run in list_runs(root) if not run.alive]
    for run in dead:
        _remove(run.runtime)
    return [run.run_id for run in dead]


def list_runs(root: Path) -> list[FoundRun]:
    """Every run that has a runtime folder under `root`, in order of their ids. Waits for nothing.

    A folder that is just being made, or removed, may look dead: only the root's lock would tell.
    """
    try:
        with os.scandir(root) as entries:
            ids = sorted(
                entry.name for entry in entries if _RUN_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []
    return [FoundRun(run_id, root / run_id, _is_locked(root / run_id / "lock")) for run_id in ids]


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def _root_locked(root: Path, waits: WaitBoard) -> Iterator[None]:
    with _disk(root):
        fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(fd, f"lock of {root}", waits)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, what: str, waits: WaitBoard) -> None:
    """Take an exclusive lock; the wait is short, since others hold it only to look or to sweep."""
    with waits.waiting(what, "another rose process", ROOT_LOCK_TIMEOUT_S) as wait:
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.time() >= wait.deadline_s:
                    raise DeadlineExceeded(
                        f"another rose process: no {what} after {ROOT_LOCK_TIMEOUT_S:g} s",
                        boundary="cluster",
                        to_do="see who holds it (fuser) and end that process",
                    ) from None
            time.sleep(_POLL_S)


def _checked_socket(runtime: Path, name: str) -> Path:
    path = runtime / name
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ClusterError(
            f"{runtime}: too long a path, a socket in it needs {length} bytes",
            expected=f"at most {SOCKET_PATH_BYTES_MAX} bytes",
            to_do="set ROSE_RUNTIME_DIR to a shorter path, or shorten run.name",
        )
    return path


def _remove(folder: Path) -> None:
    """Remove a folder in which a dying process may still be writing."""
    for attempt in range(3):
        try:
            return shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                return None
        except OSError as error:
            if attempt == 2:
                raise ClusterError(
                    f"{folder}: cannot be removed: {error.strerror}", to_do="see what holds it, then remove it by hand"
                ) from error
    raise ClusterError(f"{folder}: another process keeps writing into it", to_do="end that process")


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn what the system says of a write into a ClusterError with the path and the space left there."""
    try:
        yield
    except OSError as error:
        raise ClusterError(
            f"{path}: {error.strerror or error}; {_free(path)}",
            expected="a folder that can be written",
            to_do="free some space, or choose another folder (run.out, --out, ROSE_RUNTIME_DIR)",
        ) from error


def _free(path: Path) -> str:
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    try:
        return f"{shutil.disk_usage(path).free / 2**20:.0f} MiB free"
    except OSError:
        return "free space unknown"
