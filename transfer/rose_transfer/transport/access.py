"""What a user names in files and on command lines, made ready for a transport: addresses, tokens, certificates.

A token is read from a file, never from an argument, where everybody on the host could see it.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from rose.errors import ConfigError
from rose_transfer.transport.auth import checked_token


def read_token(file: Path) -> str:
    """The token in a file, without the white space around it. Raises ConfigError if it cannot be one."""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}",
            expected="a file with the transfer token",
            to_do="make one with: openssl rand -hex 32",
        ) from error
    checked_token(token)
    return token


def host_and_port(address: str) -> tuple[str, int]:
    """Of `10.0.0.7:7070` or `[fd00::7]:7070`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not host or (":" in host and not bracketed) or not port.isascii() or not port.isdigit() or int(port) >= 2**16:
        raise ConfigError(f"{address!r} is no address", expected="HOST:PORT, such as 10.0.0.7:7070")
    return host, int(port)


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """For a server that has this certificate (PEM, with its chain). Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(
            f"{certificate} and {key} cannot be used: {error}", expected="a PEM certificate and its key"
        ) from error
    return context


def client_tls(authority: Path) -> ssl.SSLContext:
    """For a client that trusts this authority alone (PEM). Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{authority} cannot be used: {error}", expected="a PEM certificate to trust") from error
    return context
