"""Messages survive their frame; a sound frame with a senseless meaning is refused."""

from __future__ import annotations

import pytest

from rose.errors import ConfigError, ContractError
from rose_transfer.transport.auth import checked_token, client_proof, server_proof
from rose_transfer.transport.frames import PIECE_BYTES_MAX, Frame, Kind
from rose_transfer.transport.interface import Announcement, is_key
from rose_transfer.transport.messages import (
    KNOCK,
    Busy,
    Challenge,
    Data,
    Fail,
    FailCode,
    Get,
    Hello,
    Knock,
    Locate,
    Message,
    News,
    Place,
    ProtocolError,
    Watch,
    Welcome,
    parse,
    to_frame,
)

N, P = bytes(range(32)), bytes(32)


@pytest.mark.parametrize(
    "message",
    [
        Knock(),
        Knock("rdma"),
        Challenge(N),
        Hello(N, P),
        Welcome(P),
        Get(1, "sha256-ab.part", 2**40, 2**20),
        Data(2, 0, 3, b"abc"),
        Data(2, 7, 7, b""),
        Watch(3, 0, 1500),
        News(3, None),
        News(3, Announcement(0, "m0")),
        Locate(4, "k"),
        Place(4, 9, "/dev/shm/käse"),
        Fail(0, FailCode.TOKEN, "no"),
        Fail(5, FailCode.MISSING, ""),
        Busy(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_its_frame(message: Message) -> None:
    assert parse(to_frame(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.KNOCK),
        Frame(Kind.KNOCK, payload=b"knoc"),
        Frame(Kind.KNOCK, payload=KNOCK + b"a b"),
        Frame(Kind.KNOCK, payload=KNOCK + b"\xff"),
        Frame(Kind.CHALLENGE, payload=N[:-1]),
        Frame(Kind.CHALLENGE, request=1, payload=N),
        Frame(Kind.HELLO, payload=N),
        Frame(Kind.WELCOME, payload=b""),
        Frame(Kind.GET, 0, 0, 1, b"key"),
        Frame(Kind.GET, 1, 0, 0, b"key"),
        Frame(Kind.GET, 1, 0, PIECE_BYTES_MAX + 1, b"key"),
        Frame(Kind.GET, 1, 0, 1, b"../key"),
        Frame(Kind.GET, 1, 0, 1, b".hidden"),
        Frame(Kind.GET, 1, 0, 1, b"\xff"),
        Frame(Kind.GET, 1, 0, 1, b""),
        Frame(Kind.DATA, 1, 1, 3, b"abc"),
        Frame(Kind.DATA, 1, 2**64 - 1, 3, b"abc"),
        Frame(Kind.WATCH, 1, 0, 2**40),
        Frame(Kind.NEWS, 1, 5),
        Frame(Kind.NEWS, 1, 2**63, payload=b"key"),
        Frame(Kind.LOCATE, 1, 9, payload=b"key"),
        Frame(Kind.PLACE, 1, 0, 1, b"relative"),
        Frame(Kind.PLACE, 1, 0, 1, b"/a\0b"),
        Frame(Kind.FAIL, 1, 99),
        Frame(Kind.BUSY, size=1),
    ],
    ids=repr,
)
def test_a_senseless_frame_is_refused(frame: Frame) -> None:
    with pytest.raises(ProtocolError):
        parse(frame)


def test_a_long_reason_is_cut_to_what_a_frame_holds() -> None:
    parsed = parse(to_frame(Fail(1, FailCode.UNREADABLE, "ü" * 400)))
    assert isinstance(parsed, Fail)
    assert parsed.text.startswith("ü" * 200)


def test_keys_are_safe_file_names() -> None:
    assert is_key("A-z_0.9")
    assert not any(is_key(key) for key in ("", ".", "..", "a/b", "a\n", "a" * 201, "ä"))
    with pytest.raises(ContractError):
        Announcement(-1, "key")


def test_a_proof_holds_for_one_role_and_one_connection_only() -> None:
    token = checked_token("0123456789abcdef")
    proofs = {client_proof(token, N, P), client_proof(token, P, N), server_proof(token, N, P)}
    assert len(proofs | {client_proof(b"another", N, P)}) == 4


def test_a_short_token_is_refused_without_being_told() -> None:
    with pytest.raises(ConfigError) as caught:
        checked_token("hunter2")
    assert "hunter2" not in str(caught.value)
