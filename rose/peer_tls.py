"""Why a service does not answer, as far as TLS is the reason: what gRPC only calls "unavailable".

The address is dialed once more, by the standard library, which says what it met.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from rose.address import host_and_port
from rose.certificates import Certificates
from rose.errors import ConfigError
from rose.tls_identity import words
from rose.waits import WaitBoard

LOOK_S = 2.0
_LOOKS = 2
EXPECTED = "both sides with certificates of one authority, or neither"
TO_DO = "compare what both sides name as `certificates`"
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})


async def tls_trouble(address: str, certificates: Certificates | None, waits: WaitBoard) -> str:
    """What of TLS stands between this side and HOST:PORT, to follow its name.

    "" if nothing, or if nobody answers: be it that no resolver takes the name.
    """
    with contextlib.suppress(OSError, TimeoutError, ConfigError), waits.waiting("a handshake", address, LOOK_S):
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
        for _ in range(_LOOKS):
            if await _dial(address, certificates.client_context()):
                return ""
    except ssl.SSLCertVerificationError as error:
        return f"shows a certificate that {words(error)}"
    except ssl.SSLError as error:
        return "speaks no TLS, and this side was given certificates" if error.reason in _NO_TLS else ""
    # gRPC's servers give no reason: they leave. One that had just ended would not have been there again.
    why = certificates.identity.trouble()
    return f"does not accept this side's certificate, which {why or 'is of another authority than it trusts'}"


async def _dial(address: str, context: ssl.SSLContext) -> bool:
    """Shake hands. Whether a first byte comes after that: a server looks at a client's certificate last.

    Raises OSError if it cannot be, ConfigError for what is no address.
    """
    host, port = host_and_port(address)
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        return bool(await reader.read(1))
    finally:
        writer.transport.abort()
