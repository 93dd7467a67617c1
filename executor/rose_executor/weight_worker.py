"""The worker's side of a weight update, mixed into vLLM's worker by `--worker-extension-cls`.

Invariants
- Staging reads and verifies in its own thread, beside the live weights, while the engine generates.
- `rose_apply` is reached only after every object of the way was found sound and the live weights, all of them, were
  found to be those that the way begins at: what can be wrong is found before the first write.
- `rose_apply` and `rose_undo` never raise: with several workers, the answers of the others would be left unread.

The engine core calls these methods by name; they answer plain values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rose.errors import RoseError
from rose_executor.live_model import LiveModel, is_captured, own_rank
from rose_transfer.layout.layout_json import to_json
from rose_transfer.live import LiveUpdate


@dataclass(slots=True)
class _Stage:
    version: int
    thread: threading.Thread | None = None
    update: LiveUpdate | None = None
    verify_ms: float = 0.0
    error: str = ""
    given_up: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        """Waits for a stage that still reads, until it has looked at `given_up`: at most one bucket's time."""
        self.given_up.set()
        if self.thread is not None:
            self.thread.join()
        if self.update is not None:
            self.update.close()


class WeightWorker:
    """Names begin with `rose_` because vLLM refuses an extension that shares one with its worker."""

    rose_stage_now: _Stage | None = None
    rose_model: LiveModel

    def rose_loaded(self) -> None:
        """Find out how the model lies in memory: the folder that it was loaded from may be gone by the next update."""
        config: Any = self.model_config  # type: ignore[attr-defined]
        rank = own_rank(self.parallel_config)  # type: ignore[attr-defined]
        captured = is_captured(self.vllm_config)  # type: ignore[attr-defined]
        model = self.get_model()  # type: ignore[attr-defined]
        self.rose_model = LiveModel(model, Path(config.model), config.dtype, rank, captured=captured)

    def rose_layout(self) -> dict[str, str]:
        """The text of the layout, or an error text."""
        try:
            return {"layout": to_json(self.rose_model.layout), "error": ""}
        except RoseError as error:
            return {"layout": "", "error": str(error)}

    def rose_stage(self, version: int, objects: str, way: Sequence[tuple[str, bool]]) -> None:
        """Begin to stage a way to a version (see `LiveModel.update`); a stage that was not applied is given up."""
        stage = _Stage(version)
        work = (stage, self.rose_stage_now, Path(objects), way)
        stage.thread = threading.Thread(target=self.rose_read, args=work, name="rose stage", daemon=True)
        self.rose_stage_now = stage
        stage.thread.start()

    def rose_staged(self) -> dict[str, Any] | None:
        """None while reading; then version, bytes, verify_ms, and an error text that is empty if all is well.

        `anew` says whether the way begins at nothing.
        """
        stage = self.rose_stage_now
        if stage is None:
            return {"version": -1, "anew": False, "bytes": 0, "verify_ms": 0.0, "error": "nothing is staged"}
        if stage.thread is not None and stage.thread.is_alive():
            return None
        return {
            "version": stage.version,
            "anew": stage.update is not None and stage.update.begins_anew,
            "bytes": 0 if stage.update is None else stage.update.encoded_bytes,
            "verify_ms": stage.verify_ms,
            "error": stage.error,
        }

    @torch.no_grad()
    def rose_apply(self, version: int) -> str:
        """Change the model's parameters to the staged version, or say why that failed; `rose_undo` must follow then."""
        stage = self.rose_stage_now
        if stage is None or stage.update is None or stage.version != version:
            return f"version {version} is not staged"
        try:
            stage.update.commit()
        except Exception as error:  # noqa: BLE001 - see the invariants
            return _words(error)
        return ""

    @torch.no_grad()
    def rose_undo(self) -> str:
        """Take back what `rose_apply` did, or say why the weights are mixed now."""
        stage = self.rose_stage_now
        if stage is None or stage.update is None:
            return ""
        try:
            stage.update.roll_back()
        except Exception as error:  # noqa: BLE001 - see the invariants
            return _words(error)
        return ""

    def rose_settled(self) -> None:
        """The update is in force, or taken back: let its memory go."""
        stage, self.rose_stage_now = self.rose_stage_now, None
        if stage is not None:
            stage.close()

    def rose_read(self, stage: _Stage, before: _Stage | None, objects: Path, way: Sequence[tuple[str, bool]]) -> None:
        """Body of the staging thread. The stage before, whose room it takes, ends first; no step waits for either."""
        began = time.perf_counter()
        try:
            if before is not None:
                before.close()
            stage.update = self.rose_model.update(stage.version, objects, [(key, back) for key, back in way])
            stage.update.stage(stage.given_up.is_set)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the one who asked to stage
            stage.error = _words(error)
            if stage.update is not None:
                stage.update.close()
        stage.verify_ms = (time.perf_counter() - began) * 1e3


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, RoseError) else f"{type(error).__name__}: {error}"
