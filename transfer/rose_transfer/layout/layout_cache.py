"""Discovered layouts on disk, by a key that names everything they depend on.

Invariants
- What `get` returns is what was put, proven by a checksum, and passed `check_destination`; anything else on
  disk counts as not there.
- A file appears whole or not at all. The cache saves time only: where it cannot be written, it says so in the
  log and the layout is discovered again next time.

A file is the SHA-256 of the text in hex, a newline, then the text of `layout_json` with an empty holder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
from pathlib import Path

from rose.errors import TransferError
from rose.logs import logger
from rose_transfer.layout.layout import Layout, check_destination
from rose_transfer.layout.layout_json import from_json, to_json

_log = logger("layout cache")


class LayoutCache:
    """Layouts as files in `folder`, which need not exist yet. Safe to share between processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str, holder: str) -> Layout | None:
        """The layout put under `key`, now as that of `holder`; None if there is none that is whole."""
        try:
            checksum, _, text = self._path(key).read_text(encoding="utf-8").partition("\n")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            _log.warning("a cached layout cannot be read", key=key, why=str(error))
            return None
        if hashlib.sha256(text.encode()).hexdigest() != checksum:
            _log.warning("a cached layout is damaged", key=key)
            return None
        try:
            layout = dataclasses.replace(from_json(text), holder=holder)
            check_destination(layout)
        except TransferError as error:
            _log.warning("a cached layout is not valid", key=key, why=str(error))
            return None
        return layout

    def put(self, key: str, layout: Layout) -> None:
        """Keep a layout under `key`, replacing what was there."""
        text = to_json(dataclasses.replace(layout, holder=""))
        draft = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(dir=self._folder, prefix=".draft-")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
            os.replace(draft, self._path(key))
        except OSError as error:
            if draft:
                with contextlib.suppress(OSError):
                    os.unlink(draft)
            _log.warning("a layout cannot be kept", key=key, why=str(error))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.layout"
