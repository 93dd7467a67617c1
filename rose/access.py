"""Who may speak to a service of a run: whoever shows the token of its file, in each call.

The token is read from a file, never from an argument, where everybody on the host could see it.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import grpc

from rose.errors import ConfigError
from rose.small_file import read_small_file

TOKEN_CHARS_MIN = 16
HEADER = "authorization"
_FILE_BYTES_MAX = 4096
_EXPECTED = "a file with the run's token"
_TO_DO = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def read_token(file: Path) -> str:
    """The token in a file, without the white space around it. Raises ConfigError if it is none, or no secret."""
    found = read_small_file(file, _FILE_BYTES_MAX, _EXPECTED)
    try:
        token = found.content.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}", expected=_EXPECTED, to_do=_TO_DO) from error
    if found.mode & 0o077:
        raise ConfigError(f"{file}: mode {found.mode:04o}", expected="mode 0600", to_do=f"chmod 600 {file}")
    if len(token) < TOKEN_CHARS_MIN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{file}: a token of {len(token)} characters",
            expected=f"{TOKEN_CHARS_MIN} or more, without space",
            to_do=_TO_DO,
        )
    return token


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """What a call carries."""
    return ((HEADER, f"Bearer {token}"),)


class Gate(grpc.aio.ServerInterceptor):
    """Lets a call through if it carries the token; all others end as unauthenticated."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        # As if for a stream of requests: it refuses without waiting for the first.
        self._closed: Any = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        shown = next((value for key, value in details.invocation_metadata if key == HEADER), "")
        given = shown if isinstance(shown, bytes) else shown.encode()
        return await continuation(details) if hmac.compare_digest(given, self._expected) else self._closed


async def _refuse(_requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
