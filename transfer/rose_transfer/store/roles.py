"""What a folder of weights is for: one role, and one process of that role at a time.

    lock       "<process id> <role>", locked as long as that process uses the folder, and read ever after

Invariants
- A folder that one role has used is refused to every other one: each removes what it has not put there itself.
- A folder with objects of nobody that is known is refused to all.
- Of two that open a folder at once, whatever their roles, one gets it. The lock ends with its process.
- A process that was forked in Python from the one that holds a folder does not hold it: it may outlive that one, as a
  worker that loads data does, and what it inherited is not for two to write with.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from enum import Enum
from pathlib import Path

from rose.errors import TransferError
from rose_transfer.store.files import check_file, disk_trouble, files_in
from rose_transfer.store.objects import is_key

_TEXT_BYTES = 64


class Role(Enum):
    """`value` stands in the lock; `folder` is what a folder of that role is called, `does` what is done with one."""

    STORE = "store"
    RECEIVER = "receiver"
    RELAY = "relay"
    ENGINE = "engine"

    @property
    def folder(self) -> str:
        return {
            Role.STORE: "a weight store, of a publisher or a relay",
            Role.RECEIVER: "a receiver's folder",
            Role.RELAY: "a relay's folder",
            Role.ENGINE: "an engine's folder",
        }[self]

    @property
    def does(self) -> str:
        return {
            Role.STORE: "writes to",
            Role.RECEIVER: "fetches into",
            Role.RELAY: "relays in",
            Role.ENGINE: "has its weights come to",
        }[self]


_MARKS = {"versions": Role.STORE, "arriving": Role.RECEIVER}
"""Folders within, by which one is known whose lock does not say it: it was copied, or there was no room to write it."""


_File = tuple[int, int]
_held: dict[int, _File] = {}
"""The locks of this process, by descriptor: by the file they are one can tell those that were closed meanwhile."""


def hold_alone(folder: Path, role: Role) -> int:
    """Make `folder`, and lock it until the descriptor is closed.

    Nothing else is changed in it. Raises TransferError that names both roles where it is in use, or of another role.
    """
    path = folder / "lock"
    with disk_trouble(f"{path} cannot be locked"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # Who had this number has closed it.
        _held.pop(descriptor, None)
        try:
            holder, told = _read(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _in_use(folder, role, told or role, holder, _file(descriptor)) from error
            _check_role(folder, _read(descriptor)[1], role)
            # A disk that is full may still be held, namelessly.
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, f"{os.getpid()} {role.value}".ljust(_TEXT_BYTES - 1).encode() + b"\n", 0)
        except BaseException:
            os.close(descriptor)
            raise
        _held[descriptor] = _file(descriptor)
    return descriptor


def told_role(folder: Path) -> Role | None:
    """The role that the lock of `folder` tells; None if it tells none, or cannot be read."""
    path = folder / "lock"
    try:
        check_file(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read(descriptor)[1]
    finally:
        os.close(descriptor)


def is_held(descriptor: int) -> bool:
    """Whether that is a lock of this process, neither closed nor inherited from the process it was forked from."""
    try:
        return descriptor in _held and _held[descriptor] == _file(descriptor)
    except OSError:
        return False


def _let_go_of_inherited() -> None:
    for descriptor in filter(is_held, tuple(_held)):
        # Whoever has the number closes it some day: it must not be that of another file by then.
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_of_inherited)


def _file(descriptor: int) -> _File:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _in_use(folder: Path, role: Role, told: Role, holder: str, file: _File) -> TransferError:
    if any(is_held(descriptor) for descriptor, held in tuple(_held.items()) if held == file):
        who, to_do = f"this process {told.does} {folder} already: process {holder}", "close what does"
    elif holder == str(os.getpid()):
        # Process ids repeat from container to container; what forks without Python keeps what it inherits.
        who = (
            f"another process {told.does} {folder}: process {holder} of another container, or one that this one forked"
        )
        to_do = "end it"
    else:
        who = f"another process {told.does} {folder}" + (f": process {holder}" if holder else "")
        to_do = "end it"
    return TransferError(who, expected=f"one at a time, and {role.folder}", to_do=f"{to_do}, or use another folder")


def _read(descriptor: int) -> tuple[str, Role | None]:
    """The process and the role that the lock tells, as far as it does."""
    words = os.pread(descriptor, _TEXT_BYTES, 0).decode("ascii", "replace").split()
    told = next((role for role in Role if words[1:] == [role.value]), None)
    return "".join(words[:1]), told


def _check_role(folder: Path, told: Role | None, role: Role) -> None:
    found = told or next((marked for name, marked in _MARKS.items() if (folder / name).is_dir()), None)
    if found not in (None, role):
        what = found.folder
    elif (
        found is None
        and (folder / "objects").is_dir()
        and any(is_key(name) for name, _ in files_in(folder / "objects"))
    ):
        what = "a folder with objects of somebody else"
    else:
        return
    raise TransferError(
        f"{folder} is {what}; as {role.folder} it would lose what is there",
        expected=f"an empty folder, or {role.folder}",
        to_do="use another folder",
    )
