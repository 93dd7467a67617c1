"""Two ends that do not fit: which of the wrong pairings it is, and what to do about it. Pure.

Who speaks another protocol is known by the first bytes that it sends, see `KNOCK` in `messages`: both sides say
something as soon as they are connected. A certificate that is not accepted is known by what TLS says of it.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from rose_transfer.transport.frames import FrameError, FrameFault

TLS_RECORDS = (b"\x16", b"\x15")
"""How a handshake of TLS begins, and an alert."""
_HANDSHAKE, _HELLO = b"\x16\x03", b"\x01"
_RECORD_HEAD, _MESSAGE_HEAD, _RECORD_BYTES_MAX = 5, 4, 2**14
_OPENINGS = {
    "HTTP": (
        b"HTTP/",
        b"GET ",
        b"HEAD ",
        b"POST ",
        b"PUT ",
        b"OPTIONS ",
        b"CONNECT ",
        b"PRI * HTTP",
        b"<!DOCTYPE",
        b"<html",
    ),
    "SSH": (b"SSH-",),
}
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})
_ALERTS_OF_CERTIFICATES = frozenset(
    {
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    }
)
_BOTH_OR_NEITHER = "use TLS on both sides, or on neither"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What is wrong between two ends, as one of them sees it; `certain` unless damage on the way may look like it."""

    what: str
    expected: str
    to_do: str
    certain: bool = True


TLS_THERE_ONLY = Mismatch("the other side speaks TLS, and this side does not", "the same on both", _BOTH_OR_NEITHER)
TLS_HERE_ONLY = Mismatch("this side speaks TLS, and the other side does not", "the same on both", _BOTH_OR_NEITHER)

NOT_ACCEPTED = Mismatch(
    "the other side left when it saw this side's certificate, or does not accept it",
    "one that is signed by the authority that is trusted there",
    "give the other side the authority that signed it",
    certain=False,
)
LEFT_AT_SIGHT = Mismatch(
    "the other side shook hands and left without a word: it asks for a certificate, or does not accept this side's",
    "one that is valid, signed by the authority that is trusted there",
    "give this side a certificate, or renew the one it has",
    certain=False,
)
SHOWS_NONE = Mismatch(
    "the other side shows no certificate, and this side asks for one",
    "one that is signed by the authority that is trusted here",
    "give the other side a certificate",
)
OTHER_TOKEN = Mismatch("the other side has another token", "the same on both sides", "compare the tokens' sources")


def of_paths(here: str, there: str | None = None) -> Mismatch:
    """Of two sides that carry pieces by other paths, empty for the connection itself; None if that is not known."""
    other = "another way" if there is None else _how(there)
    return Mismatch(
        f"pieces cross {_how(here)} on this side, and {other} on the other",
        "the same on both",
        "use the same transport on both sides",
    )


def of_first_frame(error: FrameError) -> Mismatch | None:
    """What the first frame of a connection shows that was none; None if this was a later one, or may be damage."""
    if error.opening is None:
        return None
    if error.fault is FrameFault.VERSION:
        return Mismatch(
            "the other side speaks another version of the transfer protocol",
            "the same on both sides",
            "install the same version of ROSE on both",
            certain=False,
        )
    return of_opening(error.opening) if error.fault is FrameFault.MAGIC else None


def of_opening(opening: bytes) -> Mismatch:
    """Of a side that begins with these bytes, which are no frame."""
    if opening.startswith(TLS_RECORDS) and opening[1:2] in (b"", b"\x03"):
        return TLS_THERE_ONLY
    for protocol, beginnings in _OPENINGS.items():
        if opening.startswith(beginnings):
            return _another_protocol(protocol, certain=True)
    return _another_protocol("another protocol", certain=False)


def missing_of_hello(seen: bytes) -> int | None:
    """How many bytes at least the hello of TLS that a side begins with still lacks (RFC 8446, 4.1.2 and 5.1).

    0 if all of it was seen; None if this is no hello, or one in several records, which is not looked for: whoever sent
    it in tiny ones would have each of them looked at.
    """
    head = seen[:_RECORD_HEAD]
    if head[:2] != _HANDSHAKE[: len(head)]:
        return None
    if len(head) < _RECORD_HEAD:
        return _RECORD_HEAD - len(head)
    record_bytes = int.from_bytes(head[3:], "big")
    message = seen[_RECORD_HEAD : _RECORD_HEAD + record_bytes]
    if record_bytes > _RECORD_BYTES_MAX or not message.startswith(_HELLO[: len(message)]):
        return None
    if len(message) < record_bytes:
        return record_bytes - len(message)
    hello = _MESSAGE_HEAD + int.from_bytes(message[1:_MESSAGE_HEAD], "big")
    return 0 if hello <= record_bytes else None


def of_handshake(error: BaseException) -> Mismatch | None:
    """What ended a handshake of TLS; None if the connection ended, or nothing came in time."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Mismatch(
            f"the other side's certificate is not accepted: {error.verify_message}",
            "one for the very host that is dialed, signed by the authority that is trusted here",
            "give this side the authority that signed the other's certificate",
        )
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return None
    if error.reason in _NO_TLS:
        return TLS_HERE_ONLY
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return SHOWS_NONE
    if error.reason in _ALERTS_OF_CERTIFICATES:
        return NOT_ACCEPTED
    why = (error.reason or str(error)).lower().replace("_", " ")
    return Mismatch(f"no TLS with the other side: {why}", "settings that fit", "compare both sides' TLS", certain=False)


def _how(path: str) -> str:
    return f"by {path}" if path else "on the connection"


def _another_protocol(protocol: str, *, certain: bool) -> Mismatch:
    return Mismatch(
        f"the other side speaks {protocol}",
        "the transfer protocol of ROSE",
        "compare the addresses: a service of another kind has this one",
        certain,
    )
