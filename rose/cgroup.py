"""What the control groups of this process allow: v1, v2, and the mixtures that real machines have.

Limits are those of the tightest ancestor. Reading never raises: what is not there limits nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of a page."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """`version` is where the CPU controller lives: "v1", "v2" or "none".

    `cores_max` and the memory figures are None where nothing limits. `memory_used_bytes` leaves out page cache
    that the kernel can drop. `writable`: this process may make groups of its own.
    """

    version: str
    cores_max: float | None
    memory_max_bytes: int | None
    memory_used_bytes: int | None
    freezer: bool
    writable: bool


@dataclass(frozen=True, slots=True)
class OwnGroups:
    """The folders of this process's own groups: by controller where v1 has it, and in the v2 hierarchy."""

    v1: Mapping[str, Path]
    v2: Path | None


@dataclass(frozen=True, slots=True)
class _Mount:
    """One mounted hierarchy: `top` is its mount point, `own` the folder of this process's group in it."""

    top: Path
    own: Path

    def lineage(self) -> Iterator[Path]:
        """The process's own group, then its ancestors up to the mount point."""
        yield self.own
        for parent in self.own.parents:
            if not parent.is_relative_to(self.top):
                return
            yield parent


def read_cgroup(root: Path = Path("/")) -> Cgroup:
    """Read the groups of this process; `root` is where /proc and /sys are found."""
    v1, v2 = _mounts(root)
    cpu, memory = v1.get("cpu"), v1.get("memory")
    version = "v1" if cpu else "none"
    if v2 is not None and "cpu" in _read(v2.top / "cgroup.controllers").split():
        cpu = memory = v2
        version = "v2"
    memory_max, memory_used = _memory(memory)
    freezes = "freezer" in v1 or (v2 is not None and any(v2.top.glob("*/cgroup.freeze")))
    return Cgroup(
        version=version,
        cores_max=_cores(cpu),
        memory_max_bytes=memory_max,
        memory_used_bytes=memory_used,
        freezer=freezes,
        writable=cpu is not None and os.access(cpu.own, os.W_OK | os.X_OK),
    )


def own_groups(root: Path = Path("/")) -> OwnGroups:
    """Where this process's groups lie, for whoever makes groups below them."""
    v1, v2 = _mounts(root)
    return OwnGroups({name: mount.own for name, mount in v1.items()}, None if v2 is None else v2.own)


def _mounts(root: Path) -> tuple[dict[str, _Mount], _Mount | None]:
    """Mounted v1 hierarchies by controller, and the v2 hierarchy."""
    groups: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        groups.update(dict.fromkeys(controllers.split(","), path))
    v1: dict[str, _Mount] = {}
    v2: _Mount | None = None
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or not kind[0].startswith("cgroup"):
            continue
        top = root / fields[4].lstrip("/")
        if kind[0] == "cgroup2":
            v2 = _Mount(top, _own(top, fields[3], groups.get("", "/")))
            continue
        for controller in kind[2].split(","):
            if controller in groups:
                v1[controller] = _Mount(top, _own(top, fields[3], groups[controller]))
    return v1, v2


def _own(top: Path, mounted: str, group: str) -> Path:
    """The group's folder under a mount that shows `mounted` of the hierarchy; a container may see only a part."""
    path = PurePosixPath(group)
    own = top / path.relative_to(mounted) if path.is_relative_to(mounted) else top
    return own if own.is_dir() else top


def _cores(cpu: _Mount | None) -> float | None:
    limits = []
    for group in cpu.lineage() if cpu else ():
        words = _read(group / "cpu.max").split() or [
            _read(group / "cpu.cfs_quota_us").strip(),
            _read(group / "cpu.cfs_period_us").strip(),
        ]
        quota_us, period_us = _whole(words[0]), _whole(words[-1])
        if quota_us and period_us and quota_us > 0:
            limits.append(quota_us / period_us)
    return min(limits, default=None)


def _memory(memory: _Mount | None) -> tuple[int | None, int | None]:
    tightest: tuple[int | None, int | None] = (None, None)
    for group in memory.lineage() if memory else ():
        limit = _whole(_read(group / "memory.max") or _read(group / "memory.limit_in_bytes"))
        if limit is None or limit >= _NO_LIMIT_BYTES or (tightest[0] is not None and limit >= tightest[0]):
            continue
        used = _whole(_read(group / "memory.current") or _read(group / "memory.usage_in_bytes")) or 0
        stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
        cache = _whole(stat.get("total_inactive_file") or stat.get("inactive_file", "")) or 0
        tightest = (limit, max(0, used - cache))
    return tightest


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
