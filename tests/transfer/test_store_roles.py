"""A folder is of one role for good, and of one process at a time: who opens it in another role removes nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from distribution_tools import PATIENT, line, offered, site
from store_tools import publish_line, same

from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution import Receiver, Relay, WeightPublisher
from rose_transfer.store import Objects, Store, object_key
from rose_transfer.store.roles import Role, hold_alone
from rose_transfer.transport.interface import ObjectClient


class Nobody:
    """What a client is connected to that is never asked for anything."""


def receiver(folder: Path) -> Callable[[], None]:
    return Receiver(_client(), folder, waits=WaitBoard()).close


def relay(folder: Path) -> Callable[[], None]:
    return Relay(_client(), folder, waits=WaitBoard(), serve=[])._free


def publisher(folder: Path) -> Callable[[], None]:
    return WeightPublisher(folder, waits=WaitBoard()).store.close


def engine(folder: Path) -> Callable[[], None]:
    lock = hold_alone(folder, Role.ENGINE)
    return lambda: os.close(lock)


def _client() -> ObjectClient:
    return Nobody()  # type: ignore[return-value]


ROLES = {"store": publisher, "receiver": receiver, "relay": relay, "engine": engine}
PAIRS = [(one, other) for one in ROLES for other in ROLES if one != other]


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, empty folders too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_folder_is_refused_in_another_role_and_nothing_in_it_changes(
    memory_path: Path, first: str, second: str
) -> None:
    held, wanted = Role(first), Role(second)
    close = ROLES[first](memory_path)
    with pytest.raises(TransferError, match=f"this process {held.does}.*process {os.getpid()}") as found:
        ROLES[second](memory_path)
    assert wanted.folder in str(found.value)
    close()
    before = files(memory_path)
    with pytest.raises(TransferError, match=f"is {held.folder}; as {wanted.folder} it would lose") as found:
        ROLES[second](memory_path)
    assert "use another folder" in str(found.value)
    assert files(memory_path) == before
    ROLES[first](memory_path)()


@pytest.mark.parametrize("role", ROLES)
def test_two_of_one_role_do_not_share_a_folder(memory_path: Path, role: str) -> None:
    close = ROLES[role](memory_path)
    with pytest.raises(TransferError, match=f"this process {Role(role).does}.*one at a time"):
        ROLES[role](memory_path)
    close()
    ROLES[role](memory_path)()


@pytest.mark.parametrize("role", ROLES)
def test_a_forked_process_that_lives_on_does_not_hold_the_folder(memory_path: Path, role: str) -> None:
    close = ROLES[role](memory_path)
    begun, beginning = os.pipe()
    end, ending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ending)
        os.write(beginning, b"!")
        os.read(end, 1)
        os._exit(0)
    assert os.read(begun, 1) == b"!"
    close()
    ROLES[role](memory_path)()
    os.close(ending)
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (begun, beginning, end):
        os.close(descriptor)


def test_a_store_is_closed_in_a_forked_process_and_open_in_its_own(memory_path: Path) -> None:
    with closing(Store(memory_path)) as store:
        history = publish_line(store, 2)
        child = os.fork()
        if child == 0:
            try:
                store.retire(1)
            except TransferError as error:
                store.close()
                os._exit(0 if "was closed" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(TransferError, match=r"this process writes to .* already"):
            Store(memory_path)
        assert store.retire(1) == (1,)
        assert same(list(store.read(2)), history[2])


def test_a_lock_of_another_process_with_our_number_is_not_taken_for_ours(memory_path: Path) -> None:
    """As in another container, or of one that was forked by what is not Python."""
    (memory_path / "lock").write_text(f"{os.getpid()} store\n")
    holder = subprocess.Popen(
        ["flock", "--exclusive", memory_path / "lock", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write(b"held\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(TransferError, match=r"another process writes to .* of another container, or"):
        Store(memory_path)
    holder.communicate()


def test_what_has_arrived_outlives_a_store_that_is_opened_there(memory_path: Path) -> None:
    async def check() -> None:
        store, _ = line(memory_path / "store", 2)
        async with site(memory_path) as here, offered(here, store) as (_, port):
            fetching = here.receiver(port, "arrived")
            fetched = await fetching.fetch(None, None, 2, deadline_s=PATIENT)
            fetching.close()
            with pytest.raises(TransferError, match="a receiver's folder"):
                Store(memory_path / "arrived")
            again = await here.receiver(port, "arrived").fetch(None, None, 2, deadline_s=PATIENT)
            assert (again.bytes_received, again.steps) == (0, fetched.steps)
        store.close()

    asyncio.run(check())


def test_a_copy_without_a_lock_is_known_by_what_lies_in_it(memory_path: Path) -> None:
    with closing(Store(memory_path / "store")) as store:
        history = publish_line(store, 2)
    receiver(memory_path / "receiver")()
    for name, role in (("store", Role.STORE), ("receiver", Role.RECEIVER)):
        (memory_path / name / "lock").unlink()
        other = publisher if role is Role.RECEIVER else receiver
        with pytest.raises(TransferError, match=role.folder):
            other(memory_path / name)
    with closing(Store(memory_path / "store")) as store:
        assert same(list(store.read(2)), history[2])


@pytest.mark.parametrize("role", ["store", "receiver"])
def test_objects_of_nobody_that_is_known_stay(memory_path: Path, role: str) -> None:
    (memory_path / "objects").mkdir()
    Objects(memory_path / "objects").put(b"of somebody")
    with pytest.raises(TransferError, match="objects of somebody else"):
        ROLES[role](memory_path)
    assert Objects(memory_path / "objects").read(object_key(b"of somebody")) == b"of somebody"
