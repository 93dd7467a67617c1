from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose import preflight as preflight_module
from rose.cgroup import Cgroup
from rose.config import Job
from rose.errors import ConfigError
from rose.machine import Disk, Machine
from rose.model_folder.folder import CONFIG_BYTES_MAX, read_model_folder
from rose.preflight import Check, memory_needed_bytes, preflight

GIB = 1 << 30
ROOMY = Machine(
    system="Linux",
    python="3.11",
    cpu="CPU",
    cores=8,
    cores_usable=4.0,
    avx512=True,
    memory_bytes=64 * GIB,
    memory_available_bytes=32 * GIB,
    shm=None,
    root_user=False,
    cgroup=Cgroup("v2", None, None, None, freezer=True, writable=False),
    gpus=(),
    mps="absent",
    rdma=(),
    packages={},
)


def changed(job: Job, section: str, **keys: object) -> Job:
    return job.model_copy(update={section: getattr(job, section).model_copy(update=keys)})


def look_at(job: Job, machine: Machine, root: Path) -> dict[str, Check]:
    checks = preflight(job, machine, root)
    for check in checks:
        assert check.needed
        assert check.found
        assert bool(check.to_do) is not check.ok
    return {check.name: check for check in checks}


def failed(job: Job, root: Path, machine: Machine = ROOMY) -> Check:
    """The one check that fails."""
    (one,) = [check for check in look_at(job, machine, root).values() if not check.ok]
    return one


def test_a_good_job_on_a_roomy_machine_passes(job: Job, model_folder: Path, tmp_path: Path) -> None:
    checks = look_at(job, ROOMY, tmp_path)
    assert all(check.ok for check in checks.values())
    assert set(checks) == {
        "packages", "engine port", "metrics port", "scheduler port", "weights port",
        "cores", "model folder", "context length", "KV cache", "memory",
        "runtime folder", "output folder",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "section", "key"), [("engine port", "engine", "port"), ("metrics port", "run", "metrics_port")]
)
def test_a_taken_port(job: Job, model_folder: Path, tmp_path: Path, name: str, section: str, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = failed(changed(job, section, **{key: port}), tmp_path)
    assert (check.name, check.found, check.of_job) == (name, f"{port} is taken", False)
    assert f"{section}.{key}" in check.to_do
    assert look_at(changed(job, section, **{key: port}), ROOMY, tmp_path)[name].ok


def test_a_port_whose_last_connection_is_still_closing_is_free(job: Job, model_folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            answer, _ = server.accept()
            answer.close()  # the side that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    assert look_at(changed(job, "engine", port=port), ROOMY, tmp_path)["engine port"].ok


def test_too_few_cores(job: Job, model_folder: Path, tmp_path: Path) -> None:
    check = failed(job, tmp_path, replace(ROOMY, cores_usable=1.5))
    assert (check.name, check.to_do) == ("cores", "set train.threads to 1")


def test_too_little_memory(job: Job, model_folder: Path, tmp_path: Path) -> None:
    needed = memory_needed_bytes(job, read_model_folder(model_folder))
    assert 5 * GIB < needed < 8 * GIB
    check = failed(job, tmp_path, replace(ROOMY, memory_available_bytes=needed - 1))
    assert check.name == "memory"
    assert "GiB" in check.needed


def test_what_memory_depends_on(job: Job, model_folder: Path) -> None:
    model = read_model_folder(model_folder)
    base = memory_needed_bytes(job, model)
    one_engine = changed(job, "weights", parity_every_steps=0)
    assert base - memory_needed_bytes(one_engine, model) == GIB + GIB // 2 + 4 * (model.weights_bytes // 2)
    assert (
        memory_needed_bytes(changed(one_engine, "engine", kv_cache_gib=3.0), model)
        - memory_needed_bytes(one_engine, model)
        == 2 * GIB
    )
    bigger = replace(model, weights_bytes=2 * GIB)
    # Two engines in float32, four float32 copies in the actor, one in the reference, three kept versions.
    assert memory_needed_bytes(job, bigger) - base == (8 + 20) * (GIB - model.weights_bytes // 2) + 3 * (
        2 * GIB - model.weights_bytes
    )


def test_missing_packages_are_named(
    job: Job, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module, "PACKAGES", ("json", "no_such_package"))
    check = failed(job, tmp_path)
    assert (check.name, check.found) == ("packages", "missing: no_such_package")


@pytest.mark.parametrize("name", ["runtime folder", "output folder"])
def test_a_full_disk(job: Job, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    full = job.run.out if name == "output folder" else tmp_path
    monkeypatch.setattr(preflight_module, "disk", lambda path: Disk(str(path), GIB, 1 << 20 if path == full else GIB))
    check = failed(job, tmp_path)
    assert check.name == name
    assert check.found == f"1 MiB free at {full}"


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_an_output_folder_that_is_a_file(job: Job, model_folder: Path, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    check = failed(changed(job, "run", out=tmp_path / "file" / below), tmp_path)
    assert (check.name, check.found) == ("output folder", f"{tmp_path / 'file'} is no folder")


def test_an_output_folder_that_cannot_be_written_to(
    job: Job, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Asked of the system, since root may write wherever the disk itself allows it.
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path / "shut")
    (tmp_path / "shut").mkdir()
    check = failed(changed(job, "run", out=tmp_path / "shut" / "runs"), tmp_path)
    assert (check.name, check.found) == ("output folder", f"{tmp_path / 'shut'} cannot be written to by this user")


def test_a_context_longer_than_the_models(job: Job, model_folder: Path, tmp_path: Path) -> None:
    check = failed(changed(job, "engine", max_model_len=4096), tmp_path)
    assert (check.name, check.of_job) == ("context length", True)
    assert "at most 2048" in check.to_do


def test_a_kv_cache_too_small_for_one_sequence(job: Job, model_folder: Path, tmp_path: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text()) | {"num_hidden_layers": 3000}
    (model_folder / "config.json").write_text(json.dumps(config))
    check = failed(changed(job, "engine", kv_cache_gib=0.5), tmp_path)
    assert (check.name, check.of_job) == ("KV cache", True)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_config(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return change


def as_pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def with_key(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value}))

    return change


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("config.json"), "config.json: No such file"),
        (without("tokenizer.json"), "no tokenizer.json"),
        (without("model.safetensors"), r"no \*.safetensors"),
        (with_config("{"), "not JSON"),
        (with_config("[]"), "no JSON object"),
        (with_key("vocab_size", "many"), "vocab_size = 'many'"),
        (with_key("num_hidden_layers", 0), "num_hidden_layers = 0"),
        (with_key("num_attention_heads", None), "num_attention_heads = None"),
        (with_key("head_dim", True), "head_dim = True"),
        (with_key("vocab_size", 10**400), "vocab_size = 1000"),
        (with_key("num_hidden_layers", 10**9), "num_hidden_layers = 1000000000"),
        (with_key("hidden_size", 3), "hidden_size = 3"),
        (with_key("model_type", "banana"), "model_type = 'banana'"),
        (with_key("model_type", None), "model_type = 'None'"),
        (with_config("[" * 100_000), "nested too deeply"),
        (with_config(f"{{}}{' ' * CONFIG_BYTES_MAX}"), "larger than"),
        (as_pipe("config.json"), "config.json: not a regular file"),
        (as_pipe("model.safetensors"), r"no \*.safetensors"),
    ],
)
def test_a_folder_that_is_no_model(
    job: Job, model_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(model_folder)
    with pytest.raises(ConfigError, match=said):
        read_model_folder(model_folder)
    check = failed(job, tmp_path)
    assert (check.name, check.of_job) == ("model folder", True)
    assert "model.path" in check.to_do


def test_no_folder_and_a_file(job: Job, tmp_path: Path) -> None:
    assert "no such folder" in failed(job, tmp_path).found
    job.model.path.write_text("")
    assert "not a folder" in failed(job, tmp_path).found


def test_head_dim_and_kv_heads_have_defaults(model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    del config["head_dim"], config["num_key_value_heads"]
    (model_folder / "config.json").write_text(json.dumps(config))
    assert read_model_folder(model_folder).kv_values_per_token == 2 * 3 * 4 * 32
