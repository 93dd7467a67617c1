"""The console that commands print to, and an output that never fails whoever writes to it."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from typing import IO

from rich.console import Console

PIPED_COLUMNS = 120
SHOW_CURSOR = b"\x1b[?25h\n"


def console() -> Console:
    """As wide as the terminal; wider than rich's 80 columns where there is none, so that tables stay readable."""
    made = Console()
    if not made.is_terminal:
        made.width = PIPED_COLUMNS
    return made


class EnduringOutput(io.TextIOBase):
    """Text for `inner` as long as it can be written to; after the first failure it is dropped.

    A reader that closed its pipe, a full disk and letters that the encoding lacks end nothing.
    """

    def __init__(self, inner: IO[str]) -> None:
        self._inner = inner
        self._lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._inner, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._inner.isatty()

    def fileno(self) -> int:
        return self._inner.fileno()

    def write(self, text: str) -> int:
        if not self._lost:
            try:
                self._inner.write(self._encodable(text))
            except OSError:
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if not self._lost:
            try:
                self._inner.flush()
            except OSError:
                self._give_up()

    def _encodable(self, text: str) -> str:
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)

    def _give_up(self) -> None:
        """What stands in the buffer would fail once more when Python ends: send it nowhere."""
        self._lost = True
        with suppress(OSError):  # an output without a file descriptor has nothing to send anywhere
            descriptor = self._inner.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
