"""Real connections that are cut, damaged, silent or hostile, and processes that are killed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from frame_proxy import HOLD, FrameProxy, Meddle
from transport_tools import (
    KNOCK_BYTES,
    OBJECTS,
    PIECE,
    QUICK_CLIENT,
    QUICK_SERVER,
    TOKEN,
    Memory,
    all_at_once,
    fetched,
    tcp_pair,
    until,
)

from rose.errors import DeadlineExceeded, TransferError
from rose_transfer.transport import auth
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.frames import FROM_CLIENT, FROM_SERVER, HEADER_BYTES, Decoder, Encoder, Frame
from rose_transfer.transport.interface import Announcement
from rose_transfer.transport.landing import FileLanding, MemoryLanding
from rose_transfer.transport.messages import (
    WAIT_MS_MAX,
    Busy,
    Challenge,
    Data,
    Fail,
    FailCode,
    Get,
    Hello,
    Message,
    Watch,
    Welcome,
    parse,
    to_frame,
)
from rose_transfer.transport.peer import Peer
from rose_transfer.transport.server_session import ServerLimits

SIX_PIECES = {"six": Random(6).randbytes(6 * PIECE - 7)}
TWO_STREAMS = ClientLimits(
    streams=2, window=2, piece_bytes=PIECE, greet_s=1.0, stall_s=0.3, retry_s=0.01, retry_s_max=0.05
)


async def meddled(meddle: Meddle) -> int:
    """Fetch six pieces through a proxy that meddles. Returns how many frames came by."""
    async with tcp_pair(Memory(dict(SIX_PIECES))) as pair, FrameProxy(pair.server.port, meddle) as proxy:
        client = pair.connect(limits=TWO_STREAMS, port=proxy.port)
        assert await fetched(client, "six") == SIX_PIECES["six"]
        await client.close()
        return proxy.frames


def every_frame() -> range:
    return range(asyncio.run(meddled(lambda _, frame: frame)))


def at_every_frame(change: Callable[[bytes], bytes | None]) -> None:
    """A transfer for each frame, in which that one is changed."""

    def only(at: int) -> Meddle:
        return lambda number, frame: change(frame) if number == at else frame

    frames = asyncio.run(meddled(lambda _, frame: frame))
    all_at_once(meddled(only(at)) for at in range(frames))


def test_a_connection_is_cut_at_every_frame_boundary() -> None:
    at_every_frame(lambda _: None)


def test_a_connection_is_cut_inside_every_frame() -> None:
    """The half frame holds the connection up until one side's patience ends."""
    at_every_frame(lambda frame: frame[: len(frame) // 2])


@pytest.mark.parametrize("at", [2, 4, 30, HEADER_BYTES - 1, -1], ids=["magic", "version", "offset", "sum", "payload"])
def test_every_frame_is_corrupted_once(at: int) -> None:
    def corrupt(frame: bytes) -> bytes:
        changed = bytearray(frame)
        changed[at] ^= 0x10
        return bytes(changed)

    at_every_frame(corrupt)


def test_every_frame_is_repeated_once() -> None:
    at_every_frame(lambda frame: frame * 2)


def test_every_frame_is_held_back_behind_the_next_once() -> None:
    at_every_frame(lambda _: HOLD)


def start_server(port: int, die_at: int) -> tuple[subprocess.Popen[str], int]:
    folders = [str(Path(__file__).parent), *(entry for entry in sys.path if entry)]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("transport_server_main.py")), str(port), str(die_at)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_killed_server_comes_back_and_the_fetch_goes_on() -> None:
    async def check() -> None:
        process, port = start_server(0, die_at=20)
        try:
            async with tcp_pair(Memory()) as pair:
                client = pair.connect(port=port)
                landing = MemoryLanding()
                fetch = asyncio.ensure_future(client.fetch("long", landing, deadline_s=30))
                assert await asyncio.to_thread(process.wait, 20) == -signal.SIGKILL
                assert not fetch.done()
                process, _ = await asyncio.to_thread(start_server, port, -1)
                await fetch
                assert landing.bytes_view == OBJECTS["long"]
        finally:
            process.kill()
            process.wait(10)

    asyncio.run(check())


def test_a_receiver_that_vanishes_leaves_nothing_behind() -> None:
    async def check() -> None:
        memory = Memory()
        async with tcp_pair(memory) as pair:
            for _ in range(5):
                peer = await Stranger.greeted(pair.server.port)
                peer.say(Get(1, "long", 0, PIECE))
                await peer.hear()
                peer.writer.transport.abort()
            await until(lambda: pair.server.connections == 0 and memory.open_now == 0)
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]

    asyncio.run(check())


def test_nothing_is_kept_of_a_peer_that_asked_to_be_told_in_an_hour_and_left() -> None:
    def alive() -> int:
        gc.collect()
        return sum(type(each) is Peer for each in gc.get_objects())

    async def check() -> None:
        async with tcp_pair(Memory()) as pair:
            before = alive()
            for _ in range(5):
                stranger = await Stranger.greeted(pair.server.port)
                for request in range(1, 61):
                    stranger.say(Watch(request, 9, WAIT_MS_MAX))
                assert isinstance(await stranger.hear(), Busy), "it waits for news"
                stranger.writer.transport.abort()
            await until(lambda: pair.server.connections == 0 and alive() == before)

    asyncio.run(check())


class Stranger:
    """A peer that speaks frames, as a test tells it to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._encoder = Encoder()
        self._decoder = Decoder(FROM_SERVER)

    @classmethod
    async def connected(cls, port: int) -> Stranger:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    @classmethod
    async def greeted(cls, port: int) -> Stranger:
        self = await cls.connected(port)
        challenge = await self.hear()
        assert isinstance(challenge, Challenge)
        self.say(Hello(bytes(32), auth.client_proof(TOKEN.encode(), challenge.nonce, bytes(32))))
        assert isinstance(await self.hear(), Welcome)
        return self

    def say(self, message: Message) -> None:
        self.writer.write(self._encoder.encode(to_frame(message)))

    async def hear(self) -> Message | None:
        """The next message, None at the end."""
        frames: list[Frame] = []
        while not frames:
            data = await self.reader.read(len(self._decoder.room()))
            if not data:
                return None
            frames = self._decoder.feed(data)
        return parse(frames[0])


def test_a_peer_that_says_nothing_is_dropped() -> None:
    async def check() -> None:
        async with tcp_pair(Memory()) as pair:
            stranger = await Stranger.connected(pair.server.port)
            assert isinstance(await stranger.hear(), Challenge)
            assert await stranger.hear() is None
            assert pair.server.connections == 0
            stranger.writer.close()

    asyncio.run(check())


def test_a_peer_that_does_not_read_is_dropped_and_holds_up_nobody() -> None:
    async def check() -> None:
        memory = Memory({"big": bytes(2**20), **OBJECTS})
        async with tcp_pair(memory) as pair:
            stranger = await Stranger.greeted(pair.server.port)
            for request in range(1, 61):
                stranger.say(Get(request, "big", 0, 2**20))
            await until(lambda: any(wait.what == "a piece to be read" for wait in pair.waits.snapshot()))
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]
            reads = sum(key == "big" for key, _ in memory.read)
            assert reads < 60, "a piece is read only when there is room to send it"
            await until(lambda: all(wait.what != "a piece to be read" for wait in pair.waits.snapshot()))
            stranger.writer.transport.abort()

    asyncio.run(check())


def test_bad_input_never_ends_the_server() -> None:
    async def check() -> None:
        random = Random(5)
        async with tcp_pair(Memory()) as pair:
            for round_ in range(60):
                if round_ % 2:
                    stranger = await Stranger.greeted(pair.server.port)
                else:
                    stranger = await Stranger.connected(pair.server.port)
                stranger.writer.write(random.randbytes(random.choice((1, HEADER_BYTES, 5000))))
                if round_ % 3:
                    stranger.writer.write_eof()
                stranger.writer.close()
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]

    asyncio.run(check())


def test_a_token_overheard_on_one_connection_opens_no_other() -> None:
    async def check() -> None:
        async with tcp_pair(Memory()) as pair:
            stranger = await Stranger.connected(pair.server.port)
            await stranger.hear()
            stranger.say(Hello(bytes(32), auth.client_proof(TOKEN.encode(), bytes(32), bytes(32))))
            refusal = await stranger.hear()
            assert isinstance(refusal, Fail)
            assert refusal.code is FailCode.TOKEN
            assert await stranger.hear() is None
            stranger.writer.close()

    asyncio.run(check())


def test_a_false_server_gets_nothing_asked() -> None:
    heard: list[bytes] = []

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        encoder = Encoder()
        writer.write(encoder.encode(to_frame(Challenge(bytes(32)))))
        await reader.readexactly(KNOCK_BYTES + HEADER_BYTES + 64)
        writer.write(encoder.encode(to_frame(Welcome(bytes(32)))))
        heard.append(await reader.read())
        writer.close()

    async def check() -> None:
        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        async with tcp_pair(Memory()) as pair:
            client = pair.connect(port=server.sockets[0].getsockname()[1])
            with pytest.raises(TransferError, match="does not know our token"):
                await client.fetch("long", MemoryLanding(), deadline_s=10)
            await until(lambda: bool(heard))
        server.close()

    asyncio.run(check())
    assert set(heard) == {b""}


def test_a_server_that_lies_about_where_a_piece_belongs_damages_nothing_in_place() -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        encoder, decoder = Encoder(), Decoder(FROM_CLIENT)
        writer.write(encoder.encode(to_frame(Challenge(bytes(32)))))
        _, hello = map(parse, decoder.feed(await reader.readexactly(KNOCK_BYTES + HEADER_BYTES + 64)))
        assert isinstance(hello, Hello)
        writer.write(encoder.encode(to_frame(Welcome(auth.server_proof(TOKEN.encode(), bytes(32), hello.nonce)))))
        await reader.readexactly(HEADER_BYTES + len("long"))
        writer.write(encoder.encode(to_frame(Data(1, 0, len(OBJECTS["long"]), b"!" * PIECE))))
        await reader.read()
        writer.close()

    async def check() -> None:
        server = await asyncio.start_server(lie, "127.0.0.1", 0)
        async with tcp_pair(Memory()) as pair:
            client = pair.connect(port=server.sockets[0].getsockname()[1], limits=TWO_STREAMS)
            buffer = bytearray(b"#" * 2 * PIECE).ljust(len(OBJECTS["long"]), b"?")
            landing = MemoryLanding(buffer)
            with pytest.raises(DeadlineExceeded, match="long"):
                await client.fetch("long", landing, resume_from=2 * PIECE, deadline_s=0.3)
            assert b"!" not in buffer
            assert landing.complete_bytes == 2 * PIECE
        server.close()

    asyncio.run(check())


def test_connections_are_limited_and_a_client_makes_do_with_fewer() -> None:
    async def check() -> None:
        async with tcp_pair(Memory(), limits=replace(QUICK_SERVER, connections_max=2)) as pair:
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]
            silent = [await Stranger.connected(pair.server.port) for _ in range(3)]
            said = [await stranger.hear() for stranger in silent]
            assert [isinstance(each, Challenge) for each in said] == [True, True, False]
            assert isinstance(said[-1], Fail)
            assert said[-1].code is FailCode.FULL
            for stranger in silent:
                stranger.writer.transport.abort()

    asyncio.run(check())


def test_every_client_is_served_where_each_can_have_one_connection() -> None:
    async def check() -> None:
        async with tcp_pair(Memory(), limits=ServerLimits(connections_max=6)) as pair:
            clients = [pair.connect() for _ in range(6)]
            for _ in range(2):
                for client in clients:
                    assert await fetched(client, "long") == OBJECTS["long"], "others hold what they no longer need"
                assert await asyncio.gather(*(fetched(client, "long") for client in clients)) == [OBJECTS["long"]] * 6

    asyncio.run(check())


def test_a_server_that_is_full_of_clients_says_so_and_takes_another_when_one_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check() -> None:
        async with tcp_pair(Memory(), limits=ServerLimits(connections_max=2)) as pair:
            first, second, third = (pair.connect() for _ in range(3))
            for client in (first, second):
                assert await fetched(client, "long") == OBJECTS["long"]
            with pytest.raises(DeadlineExceeded) as caught:
                await third.fetch("long", MemoryLanding(), deadline_s=0.3)
            assert "2 clients, as many as it takes" in caught.value.to_do
            await first.close()
            assert await fetched(third, "long") == OBJECTS["long"]

    asyncio.run(check())
    assert caplog.text.count("clients are sent away") == 1


def test_more_requests_than_allowed_end_the_connection() -> None:
    async def check() -> None:
        async with tcp_pair(Memory(), limits=ServerLimits(requests_max=3, keepalive_s=0.1)) as pair:
            stranger = await Stranger.greeted(pair.server.port)
            for request in range(1, 4):
                stranger.say(Watch(request, 0, 60_000))
            assert isinstance(await stranger.hear(), Busy)
            stranger.say(Watch(4, 0, 60_000))
            assert await stranger.hear() is None
            stranger.writer.close()

    asyncio.run(check())


def test_an_object_that_cannot_be_read_fails_only_its_own_fetch() -> None:
    async def check() -> None:
        memory = Memory(dict(OBJECTS), broken={"exact"})
        async with tcp_pair(memory) as pair:
            client = pair.connect()
            both = await asyncio.gather(fetched(client, "exact"), fetched(client, "long"), return_exceptions=True)
            assert isinstance(both[0], TransferError)
            assert "the disk fails" in str(both[0])
            assert both[1] == OBJECTS["long"]

    asyncio.run(check())


def test_a_store_that_breaks_its_contract_costs_a_connection_not_the_server() -> None:
    class Broken(Memory):
        def has(self, key: str) -> bool:
            if key == "short":
                raise ValueError("a bug")
            return super().has(key)

    async def check() -> None:
        async with tcp_pair(Broken()) as pair:
            client = pair.connect()
            with pytest.raises(DeadlineExceeded):
                await client.fetch("short", MemoryLanding(), deadline_s=0.2)
            assert await fetched(client, "long") == OBJECTS["long"]

    asyncio.run(check())


def test_nothing_is_written_once_a_fetch_has_given_up() -> None:
    async def check() -> None:
        gate = asyncio.Event()
        async with tcp_pair(Memory()) as pair:
            # Half of each piece gets through; the rest only when the fetch has given up.
            async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                server_reader, server_writer = await asyncio.open_connection("127.0.0.1", pair.server.port)

                async def up() -> None:
                    while data := await reader.read(2**16):
                        server_writer.write(data)
                    server_writer.close()

                async def down() -> None:
                    passed = 0
                    while data := await server_reader.read(1000):
                        passed += len(data)
                        if passed > 3000:
                            await gate.wait()
                        writer.write(data)
                    writer.close()

                await asyncio.gather(up(), down())

            proxy = await asyncio.start_server(dribble, "127.0.0.1", 0)
            client = pair.connect(port=proxy.sockets[0].getsockname()[1])
            buffer = bytearray(len(OBJECTS["long"]))
            fetch = asyncio.ensure_future(
                client.fetch("long", MemoryLanding(buffer), size_bytes=len(buffer), deadline_s=20)
            )
            await until(lambda: any(buffer))
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            before = bytes(buffer)
            gate.set()
            assert await fetched(client, "long") == OBJECTS["long"]
            assert buffer == before
            proxy.close()

    asyncio.run(check())


def test_a_full_disk_is_an_error_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def check() -> None:
        monkeypatch.setattr(os, "posix_fallocate", full)
        async with tcp_pair(Memory()) as pair:
            client = pair.connect()
            with pytest.raises(TransferError, match=rf"no room for {len(OBJECTS['long'])} bytes"):
                await client.fetch("long", FileLanding(tmp_path / "long"), deadline_s=10)
            assert await fetched(client, "long") == OBJECTS["long"]

    asyncio.run(check())


def test_a_capped_server_keeps_its_receivers_waiting_by_name_and_loses_none() -> None:
    async def check() -> None:
        content = Random(9).randbytes(6 * 2**20)
        async with tcp_pair(Memory({"big": content}), bandwidth_bytes_per_s=2**22) as pair:
            # Half a second of waiting is longer than this client bears silence: the server must say that it is busy.
            patient = ClientLimits(streams=1, window=2, piece_bytes=2**21, stall_s=0.35)
            fetch = asyncio.ensure_future(fetched(pair.connect(limits=patient), "big"))
            await until(lambda: any(wait.what == "its share of the bandwidth" for wait in pair.waits.snapshot()))
            assert any(wait.what == "object big" for wait in pair.waits.snapshot())
            assert await fetch == content

    asyncio.run(check())


def test_announcements_survive_a_cut_watch() -> None:
    cuts = iter([4, 9])

    async def check() -> None:
        cut = next(cuts)

        def meddle(number: int, frame: bytes) -> bytes | None:
            nonlocal cut
            if number == cut:
                cut = next(cuts, -1)
                return None
            return frame

        async with tcp_pair(Memory()) as pair, FrameProxy(pair.server.port, meddle) as proxy:
            client = pair.connect(port=proxy.port, limits=QUICK_CLIENT)
            watch = asyncio.ensure_future(client.watch(7, deadline_s=10))
            await until(lambda: cut == -1)
            pair.server.announce(Announcement(7, "m7"))
            assert await watch == Announcement(7, "m7")
            await client.close()

    asyncio.run(check())
