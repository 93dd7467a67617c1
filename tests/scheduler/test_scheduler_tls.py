"""A scheduler that asks for certificates: who fits is heard, and who does not learns why, in words."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from certificate_tools import Authority, make_authority, renew, take_over
from service_tools import LONG_S, TOKEN, free_port, offered, turn

from rose import certificates as own_certificates
from rose.certificates import Certificates, read_certificates
from rose.errors import DeadlineExceeded, SchedulerError
from rose.metrics import SchedulerMetrics
from rose.peer_tls import tls_trouble
from rose.tls_identity import TlsIdentity
from rose.waits import WaitBoard
from rose_scheduler.client import EngineState, SchedulerClient
from rose_scheduler.desk import Desk
from rose_scheduler.events import Standing
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement
from rose_scheduler.service import serve

OLD = "20200101000000Z 20200201000000Z"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def sound(authority: Authority) -> Path:
    return authority.signs("sound")


def unchecked(folder: Path) -> Certificates:
    """As of a side whose certificate has become old, or whose authority has changed, since it began."""
    authority, certificate, key = ((folder / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key"))
    return Certificates(folder, TlsIdentity(authority, certificate, key))


@asynccontextmanager
async def scheduler(certificates: Certificates | None, port: int = 0) -> AsyncIterator[str]:
    desk = Desk(Placement(Limits()), WaitBoard(), SchedulerMetrics())
    server, address = await serve(desk, port=port, token=TOKEN, certificates=certificates)
    try:
        yield address
    finally:
        desk.close()
        await server.stop(None)


async def offer(address: str, certificates: Certificates | None, token: str = TOKEN) -> Standing:
    async with SchedulerClient(
        address, token=token, waits=WaitBoard(), timeout_s=LONG_S, certificates=certificates
    ) as client:
        return await client.offer(offered())


def refused(there: Certificates | None, here: Certificates | None, token: str = TOKEN) -> SchedulerError:
    """What a client is told, long before its deadline."""

    async def check() -> SchedulerError:
        async with scheduler(there) as address:
            with pytest.raises(SchedulerError) as caught:
                await offer(address, here, token)
            return caught.value

    return asyncio.run(check())


def test_two_sides_of_one_authority_understand_each_other(authority: Authority, sound: Path) -> None:
    async def check() -> None:
        async with scheduler(read_certificates(str(sound))) as address:
            assert await offer(address, read_certificates(str(authority.signs("client")))) is Standing.KNOWN
            assert await tls_trouble(address, read_certificates(str(sound)), WaitBoard()) == ""

    asyncio.run(check())


def test_a_certificate_does_not_stand_in_for_the_token(sound: Path) -> None:
    certificates = read_certificates(str(sound))
    assert "the token is missing or wrong" in refused(certificates, certificates, "f" * 32).what


def test_tls_on_one_side_only(sound: Path) -> None:
    certificates = read_certificates(str(sound))
    assert "asks for certificates (TLS), and this side was given none" in refused(certificates, None).what
    assert "speaks no TLS, and this side was given certificates" in refused(None, certificates).what


def test_certificates_that_the_client_does_not_accept(authority: Authority, sound: Path, tmp_path: Path) -> None:
    here = read_certificates(str(sound))
    assert "shows a certificate that has expired" in refused(unchecked(authority.signs("old", valid=OLD)), here).what
    other = make_authority(tmp_path / "other").signs("other")
    assert "is signed by another authority" in refused(read_certificates(str(other)), here).what
    elsewhere = authority.signs("elsewhere", names="DNS:elsewhere,IP:10.0.0.1")
    assert "shows a certificate that is for another address" in refused(read_certificates(str(elsewhere)), here).what


def test_certificates_that_the_scheduler_does_not_accept(authority: Authority, sound: Path, tmp_path: Path) -> None:
    there = read_certificates(str(sound))
    old = refused(there, unchecked(authority.signs("old-client", valid=OLD))).what
    assert "does not accept this side's certificate, which has expired" in old
    stranger = make_authority(tmp_path / "other").signs("stranger")
    shutil.copy(sound / "ca.crt", stranger / "ca.crt")  # it trusts the scheduler, and is not trusted
    why = refused(there, unchecked(stranger)).what
    assert "does not accept this side's certificate, which is signed by another authority" in why
    # What it trusts is its own authority and another one's: nothing is wrong with it as far as it can see itself.
    with (stranger / "ca.crt").open("ab") as trusted:
        trusted.write((stranger.parent / "ca.crt").read_bytes())
    assert "which is of another authority than it trusts" in refused(there, read_certificates(str(stranger))).what


def test_one_that_is_away_or_silent_is_no_trouble_of_tls(sound: Path) -> None:
    certificates = read_certificates(str(sound))

    async def hears(look: Callable[[str], Awaitable[str]], says: bytes | None) -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            if says is not None:
                writer.write(says)
                writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        try:
            return await look(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            server.close()

    async def check() -> None:
        waits = WaitBoard()
        for own in (certificates, None):

            async def look(address: str, own: Certificates | None = own) -> str:
                return await tls_trouble(address, own, waits)

            for nobody in (f"127.0.0.1:{free_port()}", "127.0.0.1:99999", "sched..example:7080", "nowhere"):
                assert await tls_trouble(nobody, own, waits) == ""
            assert await hears(look, b"") == ""
            assert await hears(look, None) == ""
            assert waits.snapshot() == ()

    asyncio.run(check())


def test_a_scheduler_that_is_away_is_waited_for_with_certificates_too(sound: Path) -> None:
    certificates = read_certificates(str(sound))

    async def check() -> None:
        client = SchedulerClient(
            f"127.0.0.1:{free_port()}", token=TOKEN, waits=WaitBoard(), timeout_s=0.3, certificates=certificates
        )
        async with client:
            with pytest.raises(DeadlineExceeded):
                await client.offer(offered())

    asyncio.run(check())


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were renewed are seen at the next connection."""
    monkeypatch.setattr(own_certificates, "LOOK_EVERY_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_scheduler_shows_what_is_renewed_to_those_who_come_and_parts_with_nobody(
    authority: Authority, sound: Path, tmp_path: Path
) -> None:
    folder, new = authority.signs("renewed"), make_authority(tmp_path / "new").signs("new")

    async def check() -> None:
        old_side = read_certificates(str(sound))
        async with scheduler(read_certificates(str(folder))) as address:
            waits = WaitBoard()
            async with SchedulerClient(
                address, token=TOKEN, waits=waits, timeout_s=LONG_S, certificates=old_side
            ) as early:
                assert await early.offer(offered()) is Standing.KNOWN
                take_over(folder, new, "tls.crt")  # its key is still on its way
                assert await offer(address, old_side) is Standing.KNOWN
                renew(folder, new)
                assert await offer(address, read_certificates(str(new))) is Standing.KNOWN
                with pytest.raises(SchedulerError, match="signed by another authority"):
                    await offer(address, old_side)
                assert await early.offer(offered()) is Standing.KNOWN

    asyncio.run(check())


async def places_a_turn(client: SchedulerClient) -> None:
    engine = offered()
    assert await client.offer(engine) is Standing.KNOWN
    await client.beat(engine, EngineState(0, 1, 0.0))
    async with client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S) as lease:
        assert lease.engine_id == engine.engine_id


@pytest.mark.usefixtures("at_once")
def test_a_client_shows_what_is_renewed_when_it_connects_again(authority: Authority, tmp_path: Path) -> None:
    folder, new = authority.signs("renewed-client"), make_authority(tmp_path / "new").signs("new")

    async def check() -> None:
        port, here = free_port(), read_certificates(str(folder))
        client = SchedulerClient(
            f"127.0.0.1:{port}", token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S, certificates=here
        )
        async with client:
            async with scheduler(here, port):
                await places_a_turn(client)
            renew(folder, new)
            async with scheduler(read_certificates(str(new)), port):
                await places_a_turn(client)

    asyncio.run(check())
