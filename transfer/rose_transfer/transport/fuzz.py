"""`python -m rose_transfer.transport.fuzz`: throw damaged and hostile bytes at what reads the network.

Three kinds of case, drawn from a seed
- damaged: sound frames with bits flipped, bytes cut, repeated, swapped or overwritten. The decoder may yield only a
  prefix of the frames that were sent, whole and in order.
- hostile: a frame with any fields and right checksums, as only an enemy sends it. The decoder must accept exactly
  what its rules allow, and then the message parser and both sessions must answer or refuse, never raise.
- noise: bytes at random. Nothing may come out.
"""

from __future__ import annotations

import argparse
import struct
import time
from collections.abc import Callable
from random import Random

import xxhash

from rose.errors import ContractError
from rose_transfer.transport import auth, client_events, server_session
from rose_transfer.transport.client_session import ClientSession
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.frames import (
    FROM_CLIENT,
    FROM_SERVER,
    HEADER_BYTES,
    MAGIC,
    PAYLOAD_BYTES_MAX,
    WIRE_VERSION,
    Decoder,
    Encoder,
    Frame,
    FrameError,
    Kind,
)
from rose_transfer.transport.interface import Announcement
from rose_transfer.transport.messages import Challenge, Data, Fail, FailCode, Get, Hello, News, Watch, Welcome, to_frame
from rose_transfer.transport.server_session import ServerLimits, ServerSession

_FIELDS = struct.Struct("<4sBBHIIQQQQ")
_TOKEN = b"a token to fuzz with"
_NONCE = bytes(32)
_STREAMS = 64


class Fuzzer:
    """Draws cases from `seed` and judges them. Raises ContractError at the first that is handled wrongly."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._streams = [self._stream() for _ in range(_STREAMS)]
        self._cases: tuple[Callable[[], None], ...] = (self._damaged, self._damaged, self._damaged, self._hostile)

    def run(self, cases: int) -> None:
        for number in range(cases):
            if number % 16 == 15:
                self._noise()
            else:
                self._cases[number % 4]()

    def _stream(self) -> tuple[list[Frame], list[bytes]]:
        encoder = Encoder()
        frames = [self._message() for _ in range(self._random.randint(1, 3))]
        return frames, [encoder.encode(frame) for frame in frames]

    def _message(self) -> Frame:
        payload = self._random.randbytes(self._random.choice((0, 1, 7, 64)))
        return self._random.choice(
            [
                to_frame(Data(self._random.randint(1, 9), 0, len(payload), payload)),
                to_frame(News(2, Announcement(7, "manifest-7"))),
                to_frame(News(3, None)),
                to_frame(Fail(1, FailCode.MISSING, "not here")),
            ]
        )

    def _damaged(self) -> None:
        random = self._random
        sent, chunks = self._streams[random.randrange(_STREAMS)]
        data = bytearray(b"".join(chunks))
        at = random.randrange(len(data))
        match random.randrange(6):
            case 0:
                data[at] ^= 1 << random.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at : at + random.randint(1, 8)]
            case 3:
                data[at:at] = random.randbytes(random.randint(1, 8))
            case 4:
                data[at : at + 8] = random.randbytes(8)
            case _:
                data = bytearray(b"".join(random.choices(chunks, k=len(chunks) + 1)))
        came = self._decode(Decoder(FROM_SERVER), data)
        if len(came) > len(sent) or any(_differ(mine, theirs) for mine, theirs in zip(came, sent, strict=False)):
            raise ContractError(f"bytes {data.hex()} gave {came} where {sent} was sent")

    def _hostile(self) -> None:
        random = self._random
        kind = random.choice((*Kind, 0, 12, 255))
        version = WIRE_VERSION if random.random() < 0.95 else random.randrange(256)
        reserved = 0 if random.random() < 0.95 else random.randrange(65536)
        payload = random.randbytes(random.choice((0, 0, 5, 32, 64, 201)))
        length = len(payload) if random.random() < 0.95 else random.randrange(2**32)
        sequence = 0 if random.random() < 0.95 else random.randrange(2**64)
        numbers = [random.choice((0, 1, 2, 64, 2**20, 2**32 - 1, 2**63, 2**64 - 1)) for _ in range(2)]
        request = random.choice((0, 1, 2, 2**32 - 1))
        fields = _FIELDS.pack(
            MAGIC, version, kind, reserved, request, length, sequence, *numbers, xxhash.xxh3_64_intdigest(payload)
        )
        data = fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little") + payload
        sound = version == WIRE_VERSION and not reserved and not sequence and length == len(payload)
        for accepts in (FROM_CLIENT, FROM_SERVER):
            frames = self._decode(Decoder(accepts), data)
            allowed = sound and kind in accepts and length <= PAYLOAD_BYTES_MAX[Kind(kind)]
            if bool(frames) != allowed:
                raise ContractError(f"bytes {data.hex()} gave {frames}, allowed is {allowed}")
            if frames and accepts is FROM_CLIENT:
                self._tell_server(frames[0])
            elif frames:
                self._tell_client(frames[0])

    def _noise(self) -> None:
        data = self._random.randbytes(self._random.randrange(2 * HEADER_BYTES))
        if self._decode(Decoder(FROM_SERVER), data):
            raise ContractError(f"noise {data.hex()} was taken for a frame")

    def _decode(self, decoder: Decoder, data: bytes | bytearray) -> list[Frame]:
        frames: list[Frame] = []
        at = 0
        try:
            while at < len(data):
                room = decoder.room()
                count = min(len(room), len(data) - at)
                room[:count] = data[at : at + count]
                at += count
                frame = decoder.advance(count)
                if frame is not None:
                    frames.append(frame)
            decoder.end()
        except FrameError:
            pass
        return frames

    def _tell_server(self, frame: Frame) -> None:
        session = ServerSession(_TOKEN, _NONCE, ServerLimits(), local=False)
        session.step(server_session.Began(), 0.0)
        if self._random.random() < 0.5:
            hello = Hello(_NONCE, auth.client_proof(_TOKEN, _NONCE, _NONCE))
            session.step(server_session.Arrived(to_frame(hello)), 0.0)
            session.step(server_session.Entered(), 0.0)
            session.step(server_session.Arrived(to_frame(Watch(1, 5, 1000))), 0.0)
        session.step(server_session.Arrived(frame), 0.0)

    def _tell_client(self, frame: Frame) -> None:
        session = ClientSession(_TOKEN, _NONCE, ClientLimits(streams=1))
        session.step(client_events.FetchAsked(1, "some-key", 0, None), 0.0)
        session.step(client_events.Connected(1), 0.0)
        if self._random.random() < 0.5:
            actions = session.step(client_events.Arrived(1, to_frame(Challenge(_NONCE))), 0.0)
            hello = next(each.message for each in actions if isinstance(each, client_events.Send))
            if not isinstance(hello, Hello):
                raise ContractError(f"a challenge was answered by {hello}")
            welcome = Welcome(auth.server_proof(_TOKEN, _NONCE, hello.nonce))
            actions = session.step(client_events.Arrived(1, to_frame(welcome)), 0.0)
            if not any(isinstance(each, client_events.Send) and isinstance(each.message, Get) for each in actions):
                raise ContractError(f"a welcomed client asks for nothing: {actions}")
        session.step(client_events.Arrived(1, frame), 0.0)


def _differ(one: Frame, other: Frame) -> bool:
    same_head = (one.kind, one.request, one.offset, one.size) == (other.kind, other.request, other.offset, other.size)
    return not same_head or bytes(one.payload) != bytes(other.payload)


def main() -> None:
    """Run as many cases as asked and say how fast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began_s = time.perf_counter()
    Fuzzer(asked.seed).run(asked.cases)
    took_s = time.perf_counter() - began_s
    parser.exit(message=f"{asked.cases} cases from seed {asked.seed} hold, {took_s:.1f} s\n")


if __name__ == "__main__":
    main()
