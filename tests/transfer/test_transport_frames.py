"""The frame decoder yields what was encoded, or refuses: never anything else, never more memory than allowed."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rose_transfer.transport.frames import (
    FROM_CLIENT,
    FROM_SERVER,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    PIECE_BYTES_MAX,
    Decoder,
    Encoder,
    Frame,
    FrameError,
    FrameFault,
    Header,
    Kind,
)
from rose_transfer.transport.fuzz import Fuzzer

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
FRAMES = st.builds(Frame, st.sampled_from([Kind.DATA, Kind.FAIL, Kind.PLACE]), U32, U64, U64, st.binary(max_size=300))


def encoded(*frames: Frame) -> bytes:
    encoder = Encoder()
    return b"".join(encoder.encode(frame) for frame in frames)


def plain(frame: Frame) -> Frame:
    return Frame(frame.kind, frame.request, frame.offset, frame.size, bytes(frame.payload))


def decode(decoder: Decoder, data: bytes, came: list[Frame]) -> None:
    """Byte by byte, so that `came` holds what came before an error."""
    for position in range(len(data)):
        came += decoder.feed(data[position : position + 1])
    decoder.end()


def fault_of(data: bytes, accepts: frozenset[Kind] = FROM_SERVER) -> FrameFault:
    with pytest.raises(FrameError) as caught:
        decode(Decoder(accepts), data, [])
    return caught.value.fault


def resealed(data: bytes, at: int, value: bytes) -> bytes:
    """Change a header as an enemy would, who can compute checksums."""
    fields = data[:at] + value + data[at + len(value) : HEADER_BYTES - 8]
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)) + data[HEADER_BYTES:]


@given(st.lists(FRAMES, max_size=5), st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_frames_survive_any_cutting_of_the_stream(frames: list[Frame], cuts: list[int]) -> None:
    data, decoder, came = encoded(*frames), Decoder(FROM_SERVER), []
    at = turn = 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        came += decoder.feed(data[at : at + step])
        at, turn = at + step, turn + 1
    decoder.end()
    assert [plain(frame) for frame in came] == frames


@given(st.lists(FRAMES, min_size=1, max_size=3), st.data())
def test_a_changed_byte_is_always_found(frames: list[Frame], data: st.DataObject) -> None:
    stream = bytearray(encoded(*frames))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    came: list[Frame] = []
    with pytest.raises(FrameError):
        decode(Decoder(FROM_SERVER), bytes(stream), came)
    assert [plain(frame) for frame in came] == frames[: len(came)]


@given(FRAMES, st.data())
def test_every_truncation_is_found(frame: Frame, data: st.DataObject) -> None:
    whole = encoded(frame)
    assert fault_of(whole[: data.draw(st.integers(1, len(whole) - 1))]) is FrameFault.TRUNCATED


def test_no_bytes_at_all_are_a_clean_end() -> None:
    Decoder(FROM_SERVER).end()


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (0, 2), (0, 1, 1), (2,)])
def test_repeated_missing_and_reordered_frames_are_refused(order: tuple[int, ...]) -> None:
    encoder = Encoder()
    chunks = [encoder.encode(Frame(Kind.DATA, n + 1, payload=b"abc")) for n in range(3)]
    assert fault_of(b"".join(chunks[n] for n in order)) is FrameFault.SEQUENCE


@pytest.mark.parametrize(
    ("at", "value", "fault"),
    [
        (0, b"HTTP", FrameFault.MAGIC),
        (4, b"\x01", FrameFault.VERSION),
        (5, b"\x00", FrameFault.KIND),
        (5, b"\xff", FrameFault.KIND),
        (5, bytes([Kind.GET]), FrameFault.KIND),
        (6, b"\x01", FrameFault.RESERVED),
        (12, struct.pack("<I", PIECE_BYTES_MAX + 1), FrameFault.LENGTH),
        (16, b"\x01", FrameFault.SEQUENCE),
        (40, b"\x00\x00", FrameFault.PAYLOAD),
    ],
)
def test_a_hostile_header_is_refused_for_its_reason(at: int, value: bytes, fault: FrameFault) -> None:
    assert fault_of(resealed(encoded(Frame(Kind.DATA, 1, 0, 3, b"abc")), at, value)) is fault


def test_an_unsealed_change_of_the_header_is_refused_before_its_payload_comes() -> None:
    data = bytearray(encoded(Frame(Kind.DATA, 1, 0, 3, b"abc")))
    data[24] ^= 1
    assert fault_of(bytes(data[:HEADER_BYTES])) is FrameFault.HEADER


def test_a_server_gives_no_memory_for_long_payloads() -> None:
    request = encoded(Frame(Kind.GET, 1, 0, 64, b"key"))
    for length in (PAYLOAD_BYTES_MAX[Kind.GET] + 1, 2**32 - 1):
        long = resealed(request, 12, struct.pack("<I", length))
        assert fault_of(long[:HEADER_BYTES], FROM_CLIENT) is FrameFault.LENGTH
    with pytest.raises(ValueError, match="GET"):
        Encoder().encode(Frame(Kind.GET, payload=bytes(201)))


def test_after_an_error_nothing_is_read_any_more() -> None:
    decoder, good = Decoder(FROM_SERVER), encoded(Frame(Kind.BUSY))
    with pytest.raises(FrameError):
        decoder.feed(b"x" * HEADER_BYTES)
    with pytest.raises(FrameError):
        decoder.feed(good)
    with pytest.raises(FrameError):
        decoder.end()


def test_a_payload_lands_where_it_was_placed_and_only_after_its_header_was_verified() -> None:
    land, asked = bytearray(10), []

    def place(header: Header) -> memoryview:
        asked.append(header)
        return memoryview(land)[header.offset : header.offset + header.length]

    data = encoded(Frame(Kind.DATA, 7, 4, 10, b"abc"))
    decoder = Decoder(FROM_SERVER, place)
    assert decoder.feed(data[: HEADER_BYTES - 1]) == []
    assert asked == []
    frames = decoder.feed(data[HEADER_BYTES - 1 :])
    assert asked == [Header(Kind.DATA, 7, 4, 10, 3)]
    assert bytes(land) == b"\0\0\0\0abc\0\0\0"
    assert plain(frames[0]) == Frame(Kind.DATA, 7, 4, 10, b"abc")


def test_fuzzing() -> None:
    Fuzzer(seed=1).run(4_000)
