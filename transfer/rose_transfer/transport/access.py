"""What a user names in files and on command lines, made ready for a transport: addresses, tokens.

A token is read from a file, never from an argument, where everybody on the host could see it.
"""

from __future__ import annotations

from pathlib import Path

from rose.errors import ConfigError
from rose.small_file import read_small_file
from rose_transfer.transport.auth import checked_token

_TOKEN_FILE_BYTES_MAX = 4096
_PORT_DIGITS_MAX = 5
_TOKEN = "a file with the transfer token, as `openssl rand -hex 32` draws one"


def read_token(file: Path) -> str:
    """The token in a file, without the white space around it. Raises ConfigError if it cannot be one."""
    try:
        token = read_small_file(file, _TOKEN_FILE_BYTES_MAX, _TOKEN).content.decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}", expected=_TOKEN) from error
    try:
        checked_token(token)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.what}", expected=error.expected, to_do=error.to_do) from None
    return token


def host_and_port(address: str) -> tuple[str, int]:
    """Of `10.0.0.7:7070` or `[fd00::7]:7070`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    is_port = port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS_MAX and 0 < int(port) < 2**16
    if not is_port or (":" in host and not bracketed) or not _is_host(host):
        raise ConfigError(f"{address!r} is no address", expected="HOST:PORT, such as 10.0.0.7:7070")
    return host, int(port)


def _is_host(host: str) -> bool:
    """Whether this may be a name or a number of a host; names that no resolver takes are none."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return bool(host) and host.isprintable() and " " not in host
