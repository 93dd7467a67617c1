"""Why a service does not answer, as far as TLS is the reason: what gRPC only calls "unavailable".

The address is dialed once more, by the standard library, which says what it met.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from rose.certificates import Certificates, words
from rose.waits import WaitBoard

LOOK_S = 2.0
EXPECTED = "both sides with certificates of one authority, or neither"
TO_DO = "compare what both sides name as `certificates`"
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
_OF_OURS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "asks for a certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "does not trust the authority that signed this side's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "says that this side's certificate has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "does not accept this side's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "does not accept this side's certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "does not accept this side's certificate",
}


async def tls_trouble(address: str, certificates: Certificates | None, waits: WaitBoard) -> str:
    """What of TLS stands between this side and HOST:PORT, to follow its name; "" if nothing, or if nobody answers."""
    with contextlib.suppress(OSError, TimeoutError):
        with waits.waiting("a handshake", address, LOOK_S):
            async with asyncio.timeout(LOOK_S):
                return await (_speaks_tls(address) if certificates is None else _refused(address, certificates))
    return ""


async def _speaks_tls(address: str) -> str:
    """Of a side that has no certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        await _dial(address, context)
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return ""
    return "asks for certificates (TLS), and this side was given none"


async def _refused(address: str, certificates: Certificates) -> str:
    try:
        await _dial(address, certificates.client_context())
    except ssl.SSLCertVerificationError as error:
        return f"shows a certificate that {words(error)}"
    except ssl.SSLError as error:
        reason = error.reason or ""
        if reason in _NO_TLS:
            return "speaks no TLS, and this side was given certificates"
        return _OF_OURS.get(reason, "")
    return ""


async def _dial(address: str, context: ssl.SSLContext) -> None:
    """Shake hands, and wait for the first byte: a server says only then what it thinks of a client's certificate."""
    host, _, port = address.rpartition(":")
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    try:
        await reader.read(1)
    finally:
        writer.transport.abort()
