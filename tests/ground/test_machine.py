"""Machines of other people: a tree of files stands in for /proc and /sys."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from rose import machine
from rose.cgroup import Cgroup, read_cgroup
from rose.machine import Gpu, disk, look, parse_nvidia_smi

V1_MOUNTS = {
    "/sys/fs/cgroup/cpu": "cgroup cgroup rw,cpu,cpuacct",
    "/sys/fs/cgroup/memory": "cgroup cgroup rw,memory",
    "/sys/fs/cgroup/freezer": "cgroup cgroup rw,freezer",
}
V2_MOUNT = {"/sys/fs/cgroup": "cgroup2 cgroup rw"}
NOTHING = Cgroup("none", None, None, None, freezer=False, writable=False)


def tree(root: Path, groups: str, mounts: dict[str, str], files: dict[str, str], mounted: str = "/") -> Path:
    lines = [f"30 20 0:26 {mounted} {at} rw - {kind}" for at, kind in mounts.items()]
    everything = {"/proc/self/cgroup": groups, "/proc/self/mountinfo": "\n".join(lines), **files}
    for path, text in everything.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert read_cgroup(tmp_path) == NOTHING


def test_v1_limits_of_the_tightest_ancestor(tmp_path: Path) -> None:
    cpu, memory = "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/memory"
    files = {
        f"{cpu}/a/cpu.cfs_quota_us": "150000",
        f"{cpu}/a/cpu.cfs_period_us": "100000",
        f"{cpu}/a/b/cpu.cfs_quota_us": "-1",
        f"{cpu}/a/b/cpu.cfs_period_us": "100000",
        f"{memory}/memory.limit_in_bytes": "9223372036854771712",
        f"{memory}/a/memory.limit_in_bytes": "4000",
        f"{memory}/a/memory.usage_in_bytes": "3000",
        f"{memory}/a/memory.stat": "cache 9\ntotal_inactive_file 500\n",
        f"{memory}/a/b/memory.limit_in_bytes": "8000",
    }
    root = tree(tmp_path, "4:memory:/a/b\n1:cpu,cpuacct:/a/b\n2:freezer:/\n0::/\n", V1_MOUNTS, files)
    assert read_cgroup(root) == Cgroup("v1", 1.5, 4000, 2500, freezer=True, writable=True)


def test_v2_limits_of_the_tightest_ancestor(tmp_path: Path) -> None:
    top = "/sys/fs/cgroup"
    files = {
        f"{top}/cgroup.controllers": "cpuset cpu io memory",
        f"{top}/a/cgroup.freeze": "0",
        f"{top}/a/cpu.max": "50000 100000",
        f"{top}/a/b/cpu.max": "max 100000",
        f"{top}/a/b/memory.max": "1000",
        f"{top}/a/b/memory.current": "900",
        f"{top}/a/b/memory.stat": "inactive_file 1200\n",
        f"{top}/a/memory.max": "max",
    }
    found = read_cgroup(tree(tmp_path, "0::/a/b\n", V2_MOUNT, files))
    assert found == Cgroup("v2", 0.5, 1000, 0, freezer=True, writable=True)


def test_an_empty_v2_beside_v1_counts_as_v1(tmp_path: Path) -> None:
    mounts = {**V1_MOUNTS, "/sys/fs/cgroup/unified": "cgroup2 cgroup2 rw"}
    files = {"/sys/fs/cgroup/unified/cgroup.controllers": "hugetlb", "/sys/fs/cgroup/cpu/tasks": ""}
    assert read_cgroup(tree(tmp_path, "1:cpu:/\n0::/\n", mounts, files)).version == "v1"


def test_a_container_that_sees_only_its_part_of_the_hierarchy(tmp_path: Path) -> None:
    files = {
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/memory/inner/memory.limit_in_bytes": "77",
    }
    root = tree(tmp_path, "1:cpu:/docker/x\n2:memory:/docker/x/inner\n", V1_MOUNTS, files, mounted="/docker/x")
    assert read_cgroup(root).cores_max == 2.0
    assert read_cgroup(root).memory_max_bytes == 77
    for unseen in ("/elsewhere", "/docker/x/unseen"):
        outside = tree(tmp_path, f"1:cpu:{unseen}\n", V1_MOUNTS, files, mounted="/docker/x")
        assert (read_cgroup(outside).cores_max, read_cgroup(outside).writable) == (2.0, True)


@pytest.mark.parametrize("text", ["", "garbage", "max", "-1 100000", "100000 0", "\udcff"])
def test_limits_that_cannot_be_read_limit_nothing(tmp_path: Path, text: str) -> None:
    files = {"/sys/fs/cgroup/cgroup.controllers": "cpu memory"}
    root = tree(tmp_path, "0::/\n", V2_MOUNT, files)
    (root / "sys/fs/cgroup/cpu.max").write_bytes(text.encode(errors="surrogateescape"))
    (root / "sys/fs/cgroup/memory.max").write_bytes(text.encode(errors="surrogateescape"))
    found = read_cgroup(root)
    assert (found.version, found.memory_max_bytes, found.cores_max) == ("v2", None, None)


@pytest.mark.parametrize("text", ["garbage", "::", "0:", "\n\n"])
def test_groups_that_cannot_be_read_are_no_groups(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, text, V1_MOUNTS, {"/proc/self/mountinfo": f"30 20\n{text}\n - \n"})
    assert read_cgroup(root) == NOTHING


def test_this_machine_can_be_looked_at_and_written_as_json() -> None:
    found = look()
    assert 0 < found.cores_usable <= found.cores
    assert 0 < found.memory_available_bytes <= found.memory_bytes <= psutil.virtual_memory().total
    assert found.packages["rose-rl"]
    json.dumps(asdict(found))


def test_limits_and_devices_of_the_tree_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda _name: None)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    files = {
        "/sys/fs/cgroup/cgroup.controllers": "cpu memory",
        "/sys/fs/cgroup/cpu.max": "50000 100000",
        "/sys/fs/cgroup/memory.max": "1000000",
        "/sys/fs/cgroup/memory.current": "400000",
        "/proc/cpuinfo": "processor : 0\nmodel name : Some CPU\nflags : sse avx512f\nprocessor : 1\nflags : sse\n",
        "/proc/driver/nvidia/gpus/0000:01:00.0/information": "",
        "/sys/class/infiniband/mlx5_0/node": "",
        "/tmp/nvidia-mps/control": "",
    }
    found = look(tree(tmp_path, "0::/\n", V2_MOUNT, files))
    assert (found.cores_usable, found.memory_bytes, found.memory_available_bytes) == (0.5, 1_000_000, 600_000)
    assert machine.memory_available_bytes(tmp_path) == 600_000
    assert (found.cpu, found.avx512) == ("Some CPU", True)
    assert (found.gpus, found.rdma, found.mps) == ((Gpu("NVIDIA GPU at 0000:01:00.0", 0),), ("mlx5_0",), "running")


def test_a_bare_machine_has_nothing_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda _name: None)
    found = look(tmp_path)
    assert (found.gpus, found.rdma, found.mps, found.avx512, found.cgroup) == ((), (), "absent", False, NOTHING)


@pytest.mark.parametrize("script", ["exit 9", "printf 'NVIDIA H200, 143771\\n'", "printf 'garbage\\n'"])
def test_nvidia_smi_may_answer_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = look(tmp_path).gpus
    assert gpus == ((Gpu("NVIDIA H200", 143_771 << 20),) if "H200" in script else ())


def test_memory_that_is_no_number_is_zero() -> None:
    text = "NVIDIA GB10, [N/A]\nNVIDIA RTX, with comma, 10\n\n"
    assert parse_nvidia_smi(text) == (Gpu("NVIDIA GB10", 0), Gpu("NVIDIA RTX, with comma", 10 << 20))


def test_a_disk_is_found_before_its_folder_exists(tmp_path: Path) -> None:
    space = disk(tmp_path / "not" / "yet")
    assert space is not None
    assert space.path == str(tmp_path)
    assert 0 < space.free_bytes <= space.total_bytes
