"""Methods added to vLLM's engine core: what must happen between two steps, in the process that steps.

Invariants
- The weight version changes together with the weights, between two steps, after the prefix cache was
  emptied and every running request was set back to recompute its context: no token is ever computed from
  keys and values of another version. Who asks for `keep_kv` lets running requests, and them alone, go on with theirs.
- A failure before the first write leaves the old version whole and serving. A failure after it is taken back on all
  workers, and the old version goes on; where that fails as well the engine is *poisoned*: paused, never mixed and
  serving, until a version that begins anew on every worker is in force.

Each function takes the engine core as `self`; `vllm_plugin` installs those in `NAMES`. Results are plain
values because they travel by msgpack; an exception's text reaches the caller. Source of the pause
semantics: vLLM's `EngineCore.pause_scheduler(mode="keep")`.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from rose_executor.kept_kv import rekey

NAMES = ("rose_describe", "rose_layouts", "rose_loaded", "rose_stage", "rose_staged", "rose_commit", "rose_resume")


def rose_describe(self: Any) -> dict[str, Any]:
    """State of weights and scheduler as one consistent reading between two steps."""
    return {
        "paused": self.is_scheduler_paused(),
        "poisoned": getattr(self, "_rose_poisoned", ""),
        "version": self.scheduler.token_page.version,
    }


def rose_loaded(self: Any, version: int) -> None:
    """Name the version that was loaded at start, and what its tensors are."""
    self.collective_rpc("rose_loaded")
    _set_version(self, version)
    if (attach := getattr(self.scheduler, "attach_core", None)) is not None:
        attach(self)


def rose_layouts(self: Any) -> list[dict[str, str]]:
    """Per worker, what `WeightWorker.rose_layout` says."""
    result: list[dict[str, str]] = self.collective_rpc("rose_layout")
    return result


def rose_stage(self: Any, version: int, objects: str, way: list[tuple[str, bool]]) -> None:
    """Let every worker begin to read and verify a way to a version beside its live weights."""
    self.collective_rpc("rose_stage", args=(version, objects, way))


def rose_staged(self: Any) -> list[dict[str, Any] | None]:
    """Per worker: None while it still reads, then what `WeightWorker.rose_staged` says."""
    result: list[dict[str, Any] | None] = self.collective_rpc("rose_staged")
    return result


def rose_commit(self: Any, version: int, keep_kv: bool) -> Any:
    """Apply the staged version; return what came of it, or a Future of that while a step is in flight.

    That is {"undone": "", "pause_ms", "drain_ms", "load_ms"}; or why all was taken back and the old version goes on.
    Raises RuntimeError if this version is not staged on every worker (nothing was written), or if the engine is
    poisoned, and was or stays so.
    """
    staged = self.collective_rpc("rose_staged")
    if any(state is None or state["error"] or state["version"] != version for state in staged):
        raise RuntimeError(f"version {version} is not staged and verified on every worker: {staged}")
    poisoned = getattr(self, "_rose_poisoned", "")
    if poisoned and not all(state["anew"] for state in staged):
        raise RuntimeError(f"the engine is poisoned, and version {version} does not begin anew: {poisoned}")
    began = time.perf_counter()
    was_paused = self._rose_paused_before if poisoned else self.is_scheduler_paused()
    idle = self.pause_scheduler(mode="keep", clear_cache=False)
    if idle is None:
        return _apply(self, version, keep_kv, was_paused, began)
    result: Future[dict[str, Any]] = Future()

    def apply_when_idle(done: Future[None]) -> None:
        try:
            done.result()
            result.set_result(_apply(self, version, keep_kv, was_paused, began))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the result
            result.set_exception(error)

    idle.add_done_callback(apply_when_idle)
    return result


def _apply(self: Any, version: int, keep_kv: bool, was_paused: bool, began: float) -> dict[str, Any]:
    paused = time.perf_counter()
    try:
        undone, loaded = _change(self, version, keep_kv)
        if undone and getattr(self, "_rose_poisoned", ""):
            raise RuntimeError(f"{undone}; what was mixed before is so again")
    except BaseException as error:
        self._rose_poisoned, self._rose_paused_before = f"version {version} failed half-way: {error}", was_paused
        raise
    self._rose_poisoned = ""
    if not was_paused:
        self.resume_scheduler()
    resumed = time.perf_counter()
    return {
        "undone": undone,
        "pause_ms": (resumed - began) * 1e3,
        "drain_ms": (paused - began) * 1e3,
        "load_ms": (loaded - paused) * 1e3,
    }


def _change(self: Any, version: int, keep_kv: bool) -> tuple[str, float]:
    """Bring all workers to a version; why that was undone, "" if it was not, and when the weights were written.

    Raises whatever leaves the weights mixed, or unknown.
    """
    undone = _first(self.collective_rpc("rose_apply", args=(version,)))
    loaded = time.perf_counter()
    if not undone:
        undone = rekey(self.scheduler, version) if keep_kv else _empty_cache(self)
    if not undone:
        _set_version(self, version)
    elif mixed := _first(self.collective_rpc("rose_undo")):
        raise RuntimeError(f"{undone}; it could not be taken back: {mixed}")
    self.collective_rpc("rose_settled")
    return undone, loaded


def _empty_cache(self: Any) -> str:
    emptied = self.reset_prefix_cache(reset_running_requests=True)
    return "" if emptied else "the prefix cache could not be emptied"


def _first(answers: list[str]) -> str:
    """The first trouble that a worker tells, "" if none does."""
    return next((answer for answer in answers if answer), "")


def rose_resume(self: Any) -> None:
    """Go on after a pause. Raises RuntimeError on a poisoned engine."""
    if getattr(self, "_rose_poisoned", ""):
        raise RuntimeError(f"the engine is poisoned: {self._rose_poisoned}")
    self.resume_scheduler()


def _set_version(self: Any, version: int) -> None:
    self.set_weight_version(str(version))
    self.scheduler.token_page.version = version
