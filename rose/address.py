"""Where a service answers, as users and peers name it: HOST:PORT, or a URL.

Invariant: what passes can be dialed, as far as its form tells: no resolver and no socket takes it for nonsense.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from rose.errors import ConfigError

_PORT_DIGITS_MAX = 5
_HOST_AND_PORT = "HOST:PORT, such as 10.0.0.7:7070"
_URL = "http://HOST:PORT, such as http://10.0.0.7:8000"


def host_and_port(address: str) -> tuple[str, int]:
    """Of `10.0.0.7:7070` or `[fd00::7]:7070`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    is_port = port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS_MAX and 0 < int(port) < 2**16
    if not is_port or (":" in host and not bracketed) or not _is_host(host):
        raise ConfigError(f"{_shown(address)} is no address", expected=_HOST_AND_PORT)
    return host, int(port)


def checked_url(url: str) -> str:
    """The same, if it is one of HTTP. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    # Without white space and control characters, which `urlsplit` merely leaves out.
    plain = url.isprintable() and " " not in url
    if not plain or not url.startswith(("http://", "https://")) or port == 0 or not _is_host(host):
        raise ConfigError(f"{_shown(url)} is no URL of a service", expected=_URL)
    return url


def _is_host(host: str) -> bool:
    """Whether this may be a name or a number of a host; names that no resolver takes are none."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return bool(host) and host.isprintable() and " " not in host


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."
