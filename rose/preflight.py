"""Checks before a run: what the job needs, what is here, and what to do where it falls short.

Figures of need are estimates on the safe side, from the model folder and the job file alone: nothing is
loaded, started or imported. A check that fails says what it found, what is needed, and what to do.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from rose.config import Job
from rose.engine_limits import DTYPE_BYTES
from rose.errors import ConfigError
from rose.machine import Machine, disk
from rose.model_folder.folder import ModelFolder, read_model_folder

_GIB = 1 << 30
_MIB = 1 << 20
ENGINE_PROCESSES_BYTES = int(2.5 * _GIB)
"""Warm process, API server and engine core, without weights and KV cache (measured, with room)."""
FRESH_ENGINE_BYTES = _GIB // 2
"""What the fresh engine of a parity check adds: it shares the warm process's pages."""
RAY_BYTES = 3 * _GIB // 4
"""Ray's own processes."""
RANK_BYTES = 3 * _GIB // 4
"""Actor or reference, without weights."""
ENVIRONMENT_WORKER_BYTES = _GIB // 8
"""Without what the environment itself holds."""
RUN_BYTES = _GIB // 2
OUTPUT_BYTES = 64 * _MIB
PACKAGES = ("torch", "transformers", "vllm", "ray", "safetensors", "numpy", "aiohttp", "gymnasium")
_MODEL_FOLDER = "a model folder in Hugging Face format"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: `to_do` is empty where it is `ok`.

    `of_job`: the job file is what must change, on any machine; otherwise it is this machine that falls short.
    """

    name: str
    ok: bool
    found: str
    needed: str
    to_do: str = ""
    of_job: bool = False


def preflight(job: Job, machine: Machine, runtime_root: Path) -> list[Check]:
    """Every check of a job on this machine. `job` has absolute paths, as `load_job` gives them."""
    ports = [_port("engine port", "engine.port", job.engine.port)]
    ports.append(_port("metrics port", "run.metrics_port", job.run.metrics_port))
    ports.append(_port("scheduler port", "scheduler.port", job.scheduler.port))
    ports.append(_port("weights port", "weights.port", job.weights.port))
    checks = [_packages(), *ports, _cores(job, machine)]
    try:
        model = read_model_folder(job.model.path)
    except ConfigError as error:
        return [
            *checks,
            Check("model folder", False, error.what, _MODEL_FOLDER, f"in model.path, {error.to_do}", of_job=True),
        ]
    return [
        *checks,
        _model(model),
        _context(job, model),
        _kv_cache(job, model),
        _memory(job, model, machine),
        _disk("runtime folder", runtime_root, (job.weights.keep + 1) * model.weights_bytes + OUTPUT_BYTES),
        _disk("output folder", job.run.out, OUTPUT_BYTES),
    ]


def _model(model: ModelFolder) -> Check:
    found = f"{_mib(model.weights_bytes)} of weights" + (f"; {model.unchecked}" if model.unchecked else "")
    return Check("model folder", True, found, _MODEL_FOLDER, of_job=True)


def _packages() -> Check:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return _check(
        "packages",
        not missing,
        f"missing: {', '.join(missing)}" if missing else "all found",
        ", ".join(PACKAGES),
        "install rose-rl[cpu] or rose-rl[gpu]; in a checkout use ./dev rose",
    )


def _port(name: str, key: str, port: int) -> Check:
    needed, to_do = "a free loopback port", f"set {key} to a free port, or to 0 for any"
    if port == 0:
        return Check(name, True, "any free one", needed)
    with socket.socket() as probe:
        # As the server will: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            found = f"{port} is taken" if error.errno == errno.EADDRINUSE else f"{port}: {error.strerror}"
            return Check(name, False, found, needed, to_do)
    return Check(name, True, f"{port} is free", needed)


def _cores(job: Job, machine: Machine) -> Check:
    return _check(
        "cores",
        machine.cores_usable >= job.train.threads,
        f"{machine.cores_usable:g} usable of {machine.cores}",
        f"{job.train.threads} (train.threads)",
        f"set train.threads to {max(1, int(machine.cores_usable))}",
    )


def _context(job: Job, model: ModelFolder) -> Check:
    return _check(
        "context length",
        job.engine.max_model_len <= model.context_tokens_max,
        f"the model takes {model.context_tokens_max} tokens",
        f"{job.engine.max_model_len} (engine.max_model_len)",
        f"set engine.max_model_len to at most {model.context_tokens_max}",
        of_job=True,
    )


def _kv_cache(job: Job, model: ModelFolder) -> Check:
    needed_bytes = job.engine.max_model_len * model.kv_values_per_token * DTYPE_BYTES[job.engine.dtype]
    return _check(
        "KV cache",
        job.engine.kv_cache_gib * _GIB >= needed_bytes,
        f"{_mib(job.engine.kv_cache_gib * _GIB)} (engine.kv_cache_gib)",
        f"{_mib(needed_bytes)} for one sequence of engine.max_model_len",
        "raise engine.kv_cache_gib or lower engine.max_model_len",
        of_job=True,
    )


def _memory(job: Job, model: ModelFolder, machine: Machine) -> Check:
    needed = memory_needed_bytes(job, model)
    return _check(
        "memory",
        machine.memory_available_bytes >= needed,
        f"{_gib(machine.memory_available_bytes)} available",
        f"{_gib(needed)} for engine, KV cache and trainer",
        "end other programs, or lower engine.kv_cache_gib or train.micro_batch_tokens",
    )


def memory_needed_bytes(job: Job, model: ModelFolder) -> int:
    """Peak memory of the whole run: engine processes, their weights and KV cache, ranks, workers, kept versions.

    Weights in the folder count as two bytes a value; the actor holds each as float32 four times (weight, gradient, two
    Adam moments), the reference once; the actor holds logits with their gradient for one micro-batch, the reference
    without.
    """
    values = model.weights_bytes // 2
    engines = 2 if job.weights.parity_every_steps else 1
    per_engine = int(job.engine.kv_cache_gib * _GIB) + values * DTYPE_BYTES[job.engine.dtype]
    engine = ENGINE_PROCESSES_BYTES + (engines - 1) * FRESH_ENGINE_BYTES + engines * per_engine
    logits_bytes = 4 * job.train.micro_batch_tokens * model.vocab_size
    ranks = 2 * RANK_BYTES + (16 + 4) * values + 3 * logits_bytes
    others = RUN_BYTES + RAY_BYTES + job.environment.workers * ENVIRONMENT_WORKER_BYTES
    return engine + ranks + others + (job.weights.keep + 1) * model.weights_bytes


def _disk(name: str, path: Path, needed_bytes: int) -> Check:
    obstacle = _obstacle(path)
    if obstacle:
        to_do = "choose another folder (run.out, --out, ROSE_RUNTIME_DIR), or let this user write there"
        return Check(name, False, obstacle, "a folder that can be written", to_do)
    space = disk(path)
    free = space.free_bytes if space else 0
    return _check(
        name,
        free >= needed_bytes,
        f"{_mib(free)} free at {path}",
        _mib(needed_bytes),
        "free some space, or choose another folder (run.out, --out, ROSE_RUNTIME_DIR)",
    )


def _obstacle(path: Path) -> str:
    """Why no folder can be made at `path`, or written to if it is there; empty if it can."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    if not os.path.isdir(path):
        return f"{path} is no folder"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written to by this user"


def _check(name: str, ok: bool, found: str, needed: str, to_do: str, *, of_job: bool = False) -> Check:
    return Check(name, ok, found, needed, "" if ok else to_do, of_job)


def _gib(count: float) -> str:
    return f"{count / _GIB:.1f} GiB"


def _mib(count: float) -> str:
    return f"{count / _MIB:.0f} MiB"
