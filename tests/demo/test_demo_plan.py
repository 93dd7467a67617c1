"""What the demo is made of: refused before anything starts, or whole."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.cli.demo import demo_command
from rose.demo.lending import executor_program
from rose.demo.plan import GuestPlan, demo_checks, planned_job, planned_load, shipped_plan
from rose.demo.serving_model import ServingShape, make_serving_model, warm_start
from rose.errors import ClusterError, ConfigError
from rose.machine import look
from rose.model_folder.folder import read_model_folder
from rose.runs import Run
from rose.slo import Slo
from rose_executor.executor_config import load_executor_config

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
WRONG = {
    "negative time": (HEADER + "-1,10,10\n", "line 2"),
    "missing column": ("arrival_s,prompt_tokens\n0,10\n", "output_tokens|columns"),
    "missing field": (HEADER + "0,10\n", "2 fields under 3 columns"),
    "empty": ("", "empty"),
    "no row": (HEADER, "no request"),
    "no number": (HEADER + "0,ten,10\n", "line 2"),
}


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def started(plan: object, say: object) -> int:
        raise AssertionError("the demo started")

    monkeypatch.setattr(importlib.import_module("rose.cli.demo"), "run_demo", started)
    return lambda: None


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("nothing_starts")
def test_a_wrong_trace_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(ConfigError, match=said):
        demo_command(out=tmp_path / "out", dry_run=False, plain=True, trace=str(trace))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_starts")
def test_a_machine_that_is_too_small_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    plan = shipped_plan(tmp_path)
    small = dataclasses.replace(look(), memory_available_bytes=2**30, cores_usable=1.0)
    failed = [check for check in demo_checks(plan, planned_job(plan), small) if not check.ok]
    assert [check.name for check in failed] == ["memory of all engines", "two cores"]
    monkeypatch.setattr(importlib.import_module("rose.cli.demo"), "look", lambda: small)
    with pytest.raises(ClusterError, match="two cores"):
        demo_command(out=tmp_path / "out", dry_run=False, plain=True, trace=None)


def test_a_machine_with_the_memory_that_the_readme_asks_for_is_not_refused(tmp_path: Path) -> None:
    import dataclasses

    readme = (Path(__file__).parents[2] / "README.md").read_text()
    said = re.search(r"two cores, (\d+) GiB of free memory", readme)
    assert said is not None
    plan = shipped_plan(tmp_path)
    machine = dataclasses.replace(look(), memory_available_bytes=int(said[1]) << 30, cores_usable=2.0)
    assert all(check.ok for check in demo_checks(plan, planned_job(plan), machine))


def test_the_shipped_plan_is_whole_and_its_load_keeps_its_bursts(tmp_path: Path) -> None:
    plan = shipped_plan(tmp_path)
    load, job = planned_load(plan.load), planned_job(plan)
    assert load.length_s == 60.0
    assert max(one.prompt_tokens + one.output_tokens for one in load.requests) <= plan.shape.context_tokens
    assert "CC-BY" in load.attribution
    assert job.run.out == tmp_path
    assert job.environment.latency == "tool"
    assert job.train.threads == 1
    model = read_model_folder(warm_start())
    assert plan.load.token_ids == f"5:{model.vocab_size}"


def test_the_serving_model_is_what_its_architecture_expects(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = make_serving_model(tmp_path / "one", ServingShape())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    found = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    again = make_serving_model(tmp_path / "two", ServingShape())
    assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_a_disk_that_does_not_take_the_serving_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="cannot be written"):
        make_serving_model(tmp_path / "file" / "model")


def test_a_disk_that_fills_under_the_model_is_told(tmp_path: Path) -> None:
    code = f"""
import resource
import subprocess
import sys
from pathlib import Path
from rose.demo.serving_model import make_serving_model
from rose.errors import ClusterError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    make_serving_model(Path({str(tmp_path)!r}, "model"))
except ClusterError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "the serving engine's model cannot be written" in done.stdout, done.stderr


def test_what_is_written_for_the_executor_is_what_it_reads(tmp_path: Path) -> None:
    plan = shipped_plan(tmp_path)
    service = Run("director-1", tmp_path, tmp_path, -1)
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "token").chmod(0o600)
    lend = tmp_path / "lend.toml"
    lend.write_text(f'[join]\nscheduler = "127.0.0.1:1"\nweights = "127.0.0.1:2"\ntoken_file = "{tmp_path}/token"\n')
    program = executor_program(service, GuestPlan(), planned_job(plan), Slo(0.1, 0.01), frozenset({0}), lend)
    assert program.arguments[0] == "executor"
    config = load_executor_config(tmp_path / "executor.toml", lend, {})
    assert config.serving.ttft_ms == pytest.approx(100)
    assert config.executor.state == tmp_path / "guest"
    assert config.guest.max_num_seqs == GuestPlan().max_num_seqs
    assert config.guest.model == warm_start()
