"""What the owner of an engine asks of it, checked and made ready for the wire.

What cannot be is refused here, in words: the wire itself would take a missing version for version 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rose.errors import ConfigError, TransferError
from rose.proto.v1 import engine_control_pb2 as wire
from rose.runs import SOCKET_PATH_BYTES_MAX
from rose.version_number import version_number


def address(socket_path: Path) -> str:
    """Of a control socket, for gRPC. Raises ConfigError if it is too long for a Unix socket."""
    path = os.fsencode(socket_path)
    if len(path) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"{socket_path} is too long for a Unix socket",
            expected=f"{SOCKET_PATH_BYTES_MAX} bytes at most",
            to_do="use a shorter run folder",
        )
    return f"unix:{quote(path)}"


def stage_request(version: int, objects: Path, way: Sequence[tuple[str, bool]]) -> Any:
    """A `StageVersionRequest`. Raises TransferError."""
    return wire.StageVersionRequest(version=version_number(version), objects=_folder(objects), way=_steps(way))


def commit_request(version: int, *, keep_kv: bool) -> Any:
    """A `CommitVersionRequest`. Raises TransferError."""
    if not isinstance(keep_kv, bool):
        raise TransferError(f"keep_kv={keep_kv!r} is no answer", expected="True or False")
    return wire.CommitVersionRequest(version=version_number(version), keep_kv=keep_kv)


def _folder(objects: Path) -> str:
    try:
        # The engine has a working directory of its own.
        folder = str(Path(objects).absolute())
        folder.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise TransferError(f"{objects!r} is no folder of objects: {error}", expected="a path, in UTF-8") from error
    return folder


def _steps(way: Sequence[tuple[str, bool]]) -> list[Any]:
    try:
        return [wire.WayStep(manifest=key, backwards=backwards) for key, backwards in way]
    except (TypeError, ValueError) as error:
        raise TransferError(
            f"what shall be staged is no way: {error}", expected="pairs of a manifest's key and whether it goes back"
        ) from error
