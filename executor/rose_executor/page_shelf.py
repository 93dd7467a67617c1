"""The token pages of all incarnations of one engine, living and dead, in a folder that outlives their owner.

Invariants
- Whoever asks about a dead incarnation gets its final counts, also from the next owner of the folder.
- The folder has one owner at a time; it is taken over only once nobody writes on a page of it any more.
- Pages are bounded: the oldest go when a folder is taken over.
- A page that was cut short, replaced or removed is told once and harms nobody: `total` goes on with what was counted
  last, and whoever asks for counts gets none.
- Few pages are open at once, however many engines there were.
- What an engine generated for its owner alone, before it was offered or as it woke, is set apart, in a file beside its
  page: it counts for nobody.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection
from pathlib import Path

from rose.errors import ClusterError, EngineError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.page_reader import PageReader
from rose_transfer.store.files import remove_drafts, write_whole

log = logger("page shelf")

PAGES_MAX = 256
OPEN_MAX = 16
_WRITERS_END_S = 10.0
_POLL_S = 0.05


class PageShelf:
    """Owns `folder` until `close`. Taking it over may block for seconds, until nobody writes there any more.

    Raises ClusterError if the folder cannot be had, another process owns it, or an engine of a former owner lives on.
    """

    def __init__(self, folder: Path, waits: WaitBoard) -> None:
        self.folder = folder
        self._paths: dict[str, Path] = {}
        self._open: dict[str, PageReader] = {}
        """The one that was asked longest ago first."""
        self._counted: dict[str, int] = {}
        self._final: set[str] = set()
        self._apart: dict[str, int] = {}
        self._useless: set[Path] = set()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ClusterError(f"the folder {folder} cannot be used: {error.strerror}") from error
        try:
            _lock(self._lock_fd, folder)
            self._take_over(waits)
        except BaseException:
            self.close()
            raise

    def page(self, incarnation: str) -> PageReader | None:
        """The page of an incarnation, None if there is none here. The shelf closes it, when others are asked for."""
        if (page := self._open.pop(incarnation, None)) is None and (page := self._find(incarnation)) is None:
            return None
        self._open[incarnation] = page
        while len(self._open) > OPEN_MAX:
            self._open.pop(next(iter(self._open))).close()
        return page

    def set_apart(self, incarnation: str) -> None:
        """What its page counts so far was generated for nobody but its owner.

        Raises ClusterError if that cannot be kept for the next owner of the folder, EngineError if there is no page.
        """
        self._keep_apart(incarnation, self._page(incarnation).total())

    def set_more_apart(self, incarnation: str, tokens: int) -> None:
        """So many more of its tokens were generated for nobody but its owner. Raises as `set_apart`."""
        self._keep_apart(incarnation, self._apart.get(incarnation, 0) + tokens)

    def _keep_apart(self, incarnation: str, tokens: int) -> None:
        path = _apart_path(self._page(incarnation).path)
        try:
            write_whole(path, f"{tokens}\n".encode("ascii"))
        except OSError as error:
            raise ClusterError(f"{path} cannot be written: {error.strerror}", to_do="make room there") from error
        self._apart[incarnation] = tokens

    def _page(self, incarnation: str) -> PageReader:
        page = self.page(incarnation)
        if page is None:
            raise EngineError(f"incarnation {incarnation} has no token page in {self.folder}")
        return page

    def tokens(self, incarnation: str) -> int:
        """Tokens of an incarnation, without what was set apart. Raises EngineError if there is no readable page."""
        return self._page(incarnation).total() - self._apart.get(incarnation, 0)

    def total(self, living: Collection[str] = ()) -> int:
        """Tokens of all incarnations that were asked about, or found when the folder was taken over.

        Pages of incarnations that are not `living` are read once.
        """
        for incarnation in tuple(self._paths):
            if incarnation not in self._final:
                self._count(incarnation)
            if incarnation not in living:
                self._final.add(incarnation)
        return sum(self._counted.values())

    def _count(self, incarnation: str) -> None:
        try:
            self._counted[incarnation] = self.tokens(incarnation)
        except EngineError as error:
            self._tell(self._paths[incarnation], error)

    def close(self) -> None:
        for page in self._open.values():
            page.close()
        self._open.clear()
        os.close(self._lock_fd)

    def _find(self, incarnation: str) -> PageReader | None:
        if incarnation in self._paths:
            return self._read(self._paths[incarnation])
        # An incarnation comes from whoever asks: it is compared with names, never made into one.
        for path in self.folder.glob("*.page"):
            if _incarnation(path) == incarnation:
                return self._read(path)
        return None

    def _read(self, path: Path) -> PageReader | None:
        try:
            page = PageReader(path)
        except EngineError as error:
            self._tell(path, error)
            return None
        if _incarnation(path) not in self._paths:
            self._paths[_incarnation(path)] = path
            self._apart[_incarnation(path)] = _read_apart(_apart_path(path))
        return page

    def _tell(self, path: Path, error: EngineError) -> None:
        if path not in self._useless:
            self._useless.add(path)
            log.warning("a page is of no use", why=str(error))

    def _take_over(self, waits: WaitBoard) -> None:
        remove_drafts(self.folder)
        for draft in filter(Path.is_file, self.folder.glob(".*.page.*")):
            draft.unlink(missing_ok=True)
        # What somebody else has put here is not ours to remove, nor a reason not to start.
        paths = sorted(filter(Path.is_file, self.folder.glob("*.page")), key=lambda path: path.stat().st_mtime)
        for path in paths[:-PAGES_MAX]:
            path.unlink(missing_ok=True)
            _apart_path(path).unlink(missing_ok=True)
        for path in paths[-PAGES_MAX:]:
            self.page(_incarnation(path))
        with waits.waiting("end of its engine", "former owner of the pages", _WRITERS_END_S):
            deadline_s = time.monotonic() + _WRITERS_END_S
            while writers := [life for life, path in self._paths.items() if _is_written(path)]:
                if time.monotonic() >= deadline_s:
                    page = self.page(writers[0])
                    raise ClusterError(
                        f"process {'?' if page is None else page.pid} still writes {self._paths[writers[0]]}",
                        expected="no engine left over by whoever had this folder before",
                        to_do="end that process, or use another folder",
                    )
                time.sleep(_POLL_S)


def _incarnation(path: Path) -> str:
    """`ENGINE_ID.INCARNATION.page`, as `EngineSettings.token_page` names it."""
    return path.name.split(".")[-2]


def _apart_path(page: Path) -> Path:
    return page.with_suffix(".apart")


def _read_apart(path: Path) -> int:
    """0 where there is none: the engine was never offered, or an older owner asked it nothing."""
    try:
        return int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        log.warning("what was set apart is not known", path=str(path), why=str(error))
        return 0


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ClusterError(
            f"the folder {folder} is used by another executor",
            expected="a folder for each",
            to_do="end the other one, or name another folder",
        ) from None


def _is_written(path: Path) -> bool:
    """Whether its writer lives, as the kernel says: no clock and no reused process number is asked."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
