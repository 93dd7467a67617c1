"""`rose profile`: what it refuses before anything starts, what it says, and a whole one with a real engine."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from rose.cli.app_profile import profile
from rose.cli.profile import as_data, render
from rose.machine import look
from rose.processes import family
from rose_executor.engine_settings import EngineSettings
from rose_executor.executor_config import GuestConfig
from rose_executor.profile_fit import fitted, held_out
from rose_executor.profile_key import ProfileKey, profile_key
from rose_executor.profile_program import Profiled, ProfileJob
from rose_executor.profile_store import ProfileStore
from rose_executor.step_log import SeenStep
from rose_executor.step_shape import StepShape

KEY = ProfileKey("0123456789abcdef", "Some Processor", 2, "vllm 0.32.0", "dtype=float32")


def found(noise: float = 0.05) -> Profiled:
    seeded = random.Random(1)
    steps = []
    for _ in range(500):
        seqs = seeded.choice((1, 8, 32))
        shape = StepShape(seqs + seeded.choice((0, 0, 500)), seqs, 100 * seqs * seeded.randint(0, 3))
        seconds = 0.002 + 2e-5 * shape.tokens + 3e-5 * shape.seqs + 2e-7 * shape.context_tokens
        steps.append(SeenStep(shape, seconds * seeded.uniform(1 - noise, 1 + noise)))
    return Profiled(KEY, fitted(steps, 0), steps, held_out(steps, 0), Path("kept.json"), Path("out"), 21.4)


def shown(profiled: Profiled) -> str:
    job = ProfileJob(Path("model"), Path(), Path(), False, "float32", 1024, 32, 32, 0.5, 60.0, 0, 60.0)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(profiled, job))
    return captured.get()


def test_what_was_found_is_told_in_plain_words() -> None:
    text = shown(found())
    assert "model on Some Processor, vllm 0.32.0: 500 steps in 21 s" in text
    assert "A step takes 1.9" in text or "A step takes 2.0" in text
    assert "32 sequences, 300 tokens behind each" in text
    assert "532 tokens of a prompt" in text
    assert "kept as kept.json" in text
    assert "Was the machine busy?" not in text


def test_a_busy_machine_is_named() -> None:
    assert "Was the machine busy?" in shown(found(noise=0.7))


def test_programs_get_numbers() -> None:
    data = json.loads(json.dumps(as_data(found())))
    assert data["per_token_s"] == pytest.approx(2e-5, rel=0.1)
    assert data["per_context_token_s"] == pytest.approx(2e-7, rel=0.3)
    assert data["held_out"]["median"] < 0.05
    assert data["examples"]["532 tokens of a prompt"] == pytest.approx(0.01264, rel=0.1)
    assert data["device"] == "Some Processor"


def test_it_explains_itself(rose: Any) -> None:
    assert "rose profile MODEL" in rose("--help").out
    ended = rose("profile", "--help")
    assert ended.status == 0
    assert "Some 20 seconds" in ended.out


@pytest.mark.parametrize("name", ["dtype", "max_model_len", "max_num_seqs", "block_size"])
def test_what_is_not_said_is_as_an_executor_has_its_guest(name: str) -> None:
    assert signature(profile).parameters[name].default == GuestConfig.model_fields[name].default


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype", "int8"], "float32 or bfloat16"),
        (["--block-size", "33"], "a multiple of 32"),
        (["--max-model-len", "100000"], "at most the 512 tokens"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(
    rose: Any, tiny_model: Path, tmp_path: Path, flags: list[str], words: str
) -> None:
    ended = rose("profile", tiny_model, "--store", tmp_path / "store", "--max-model-len", 256, *flags)
    assert ended.status == 2
    assert words in ended.err
    assert "starting" not in ended.err
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_no_model_or_cannot_keep_a_profile_is_refused(
    rose: Any, tiny_model: Path, tmp_path: Path
) -> None:
    assert rose("profile", tmp_path).status == 2
    (tmp_path / "file").write_text("")
    ended = rose("profile", tiny_model, "--max-model-len", 256, "--store", tmp_path / "file" / "store")
    assert ended.status == 3
    assert "cannot be kept" in ended.err
    assert not (tmp_path / "runs").exists()


def command(model: Path, *more: object) -> list[str]:
    flags = ("--max-model-len", 256, "--max-num-seqs", 16, "--kv-cache-gib", 0.0625, "--store", "store", *more)
    return [sys.executable, "-m", "rose.cli.main", "profile", str(model), *map(str, flags)]


@pytest.mark.whole_run
@pytest.mark.parametrize("serving", [False, True])
def test_a_profile_is_made_and_an_executor_finds_it(
    tiny_model: Path, tmp_path: Path, runtime_dir: Path, serving: bool
) -> None:
    flags = ["--json", *(["--serving"] if serving else [])]
    ended = subprocess.run(command(tiny_model, *flags), cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert "starting vLLM" in ended.stderr
    settings = EngineSettings("guest", tiny_model, tmp_path, tmp_path / "log", max_num_seqs=99)
    key = profile_key(replace(settings, unpacked_weights=not serving), look())
    profile = ProfileStore(tmp_path / "store").find(key)
    assert profile is not None
    assert profile.steps == data["steps"] > 300
    assert 0 < profile.seconds(StepShape(1)) < profile.seconds(StepShape(64, 16, 2000))
    assert len(Path(data["output"], "steps.jsonl").read_text().splitlines()) > data["steps"]
    assert list(runtime_dir.glob("profile-*")) == []


@pytest.mark.whole_run
@pytest.mark.parametrize("once", ["starting vLLM", "of"])
def test_ctrl_c_leaves_no_engine_and_no_profile(tiny_model: Path, tmp_path: Path, runtime_dir: Path, once: str) -> None:
    with subprocess.Popen(
        command(tiny_model, "--seconds", 600), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stderr is not None
        while once not in ran.stderr.readline():
            assert ran.poll() is None
        children = family(ran.pid)[1:]
        ran.send_signal(signal.SIGINT)
        ran.communicate(timeout=120)
    assert ran.returncode == 130
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert list((tmp_path / "store").iterdir()) == []
    assert list(runtime_dir.glob("profile-*")) == []
