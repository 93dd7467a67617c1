"""The worker's side of a weight update, mixed into vLLM's worker by `--worker-extension-cls`.

Invariants
- Staging reads and verifies in its own thread, beside the live weights, while the engine generates.
- `rose_apply` is reached only after every tensor's name, shape, dtype and checksum was found right and every
  parameter of the model was found writable: what can be wrong is found before the first write.

The model's own `load_weights` maps checkpoint names onto fused and sharded parameters, so no name is known
here. The engine core calls these methods by name; they answer plain values.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rose.errors import RoseError, TransferError
from rose_transfer.snapshot import model_shapes, open_verified


@dataclass(slots=True)
class _Stage:
    version: int
    thread: threading.Thread | None = None
    tensors: dict[str, torch.Tensor] | None = None
    bytes: int = 0
    verify_ms: float = 0.0
    error: str = ""


class WeightWorker:
    """Names begin with `rose_` because vLLM refuses an extension that shares one with its worker."""

    rose_stage_now: _Stage | None = None
    rose_shapes: dict[str, tuple[int, ...]]

    def rose_loaded(self) -> None:
        """Remember what the engine was loaded from: the folder may be gone by the next update."""
        self.rose_shapes = model_shapes(Path(self.model_config.model))  # type: ignore[attr-defined]

    def rose_stage(self, version: int, path: str) -> None:
        """Begin to read a snapshot folder; a stage that was not applied is dropped."""
        stage = _Stage(version)
        stage.thread = threading.Thread(target=self.rose_read, args=(stage, Path(path)), name="rose stage", daemon=True)
        self.rose_stage_now = stage
        stage.thread.start()

    def rose_staged(self) -> dict[str, Any] | None:
        """None while reading; then version, bytes and verify_ms, and an error text that is empty if all is well."""
        stage = self.rose_stage_now
        if stage is None:
            return {"version": -1, "bytes": 0, "verify_ms": 0.0, "error": "nothing is staged"}
        if stage.thread is not None and stage.thread.is_alive():
            return None
        return {
            "version": stage.version,
            "bytes": stage.bytes,
            "verify_ms": stage.verify_ms,
            "error": stage.error,
        }

    @torch.no_grad()
    def rose_apply(self, version: int) -> None:
        """Overwrite the model's parameters with the staged version. Raises if it is not the one staged."""
        stage = self.rose_stage_now
        if stage is None or stage.tensors is None or stage.version != version:
            raise TransferError(f"version {version} is not staged")
        model = self.get_model()  # type: ignore[attr-defined]
        loaded = model.load_weights(iter(stage.tensors.items()))
        missed = {name for name, _ in model.named_parameters()} - set(loaded)
        if missed:
            raise TransferError(f"the model's loader left out {', '.join(sorted(missed)[:4])}")
        self.rose_stage_now = None

    def rose_read(self, stage: _Stage, path: Path) -> None:
        """Body of the staging thread."""
        began = time.perf_counter()
        try:
            refuse_packed(self.get_model())  # type: ignore[attr-defined]
            snapshot, tensors = open_verified(path)
            if snapshot.version != stage.version:
                raise TransferError(f"{path} holds version {snapshot.version}", expected=f"version {stage.version}")
            read = dict(tensors)
            self.rose_compare(read)
        except RoseError as error:
            stage.error = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the one who asked to stage
            stage.error = f"{type(error).__name__}: {error}"
        else:
            stage.tensors = read
            stage.bytes = sum(tensor.nbytes for tensor in read.values())
        stage.verify_ms = (time.perf_counter() - began) * 1e3

    def rose_compare(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises TransferError unless these are, name by name and shape by shape, the engine's own tensors."""
        expected = self.rose_shapes
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            different = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
            name = different[0]
            raise TransferError(
                f"{len(different)} tensors differ from the engine's model, first {name}: {found.get(name)}",
                expected=f"{expected.get(name)}",
            )


def refuse_packed(model: torch.nn.Module) -> None:
    """Raises TransferError if any weight has an opaque copy that an update in place would not reach."""
    for name, module in model.named_modules():
        product = getattr(module, "cpu_linear", torch.nn.functional.linear)
        if product is not torch.nn.functional.linear:
            raise TransferError(
                f"the weight of {name} is packed and cannot be replaced in place",
                expected="an engine started with unpacked weights",
            )
