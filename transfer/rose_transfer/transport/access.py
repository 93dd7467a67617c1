"""The token of a transport: read from a file, never from an argument, where everybody on the host could see it."""

from __future__ import annotations

from pathlib import Path

from rose.errors import ConfigError
from rose.small_file import read_small_file
from rose_transfer.transport.auth import checked_token

_TOKEN_FILE_BYTES_MAX = 4096
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
