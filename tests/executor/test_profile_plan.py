"""What an engine is asked, what it wrote down, and what is learnt from that."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import EngineError
from rose_executor.profile_fit import STEPS_MIN, fitted, held_out
from rose_executor.profile_plan import Grid, plan
from rose_executor.step_log import SeenStep, StepLogWriter, read_steps
from rose_executor.step_shape import StepShape

GRID = Grid(seqs_max=48, context_tokens_max=1024, kv_tokens=40_000, vocab_size=300)


@given(st.integers(1, 300), st.integers(32, 5000), st.integers(64, 10**6), st.integers(2, 10**5), st.integers(0, 99))
def test_every_load_can_be_had(seqs: int, context: int, kv: int, vocabulary: int, seed: int) -> None:
    for load in plan(Grid(seqs, context, kv, vocabulary), seed):
        lengths = [len(prompt) for prompt in load.prompts]
        assert 1 <= len(lengths) <= seqs
        assert min(lengths) >= 1
        assert load.output_tokens >= 1
        assert max(lengths) + load.output_tokens <= context
        assert sum(lengths) + len(lengths) * load.output_tokens <= kv
        assert all(0 <= token < vocabulary for prompt in load.prompts for token in prompt)


def test_the_same_seed_asks_the_same() -> None:
    assert plan(GRID, 7) == plan(GRID, 7) != plan(GRID, 8)


def test_the_first_half_covers_the_grid() -> None:
    loads = plan(GRID, 0)
    half = loads[: len(loads) // 2]
    assert {len(load.prompts) for load in half} == {1, 2, 4, 8, 16, 32, 48}
    longest = [max(map(len, load.prompts)) for load in half]
    assert min(longest) <= 2
    assert max(longest) > 500
    few = loads[:10]
    assert len({len(load.prompts) for load in few}) >= 4
    assert len({len(str(max(map(len, load.prompts)))) for load in few}) >= 3


def test_no_prompt_begins_as_another_does() -> None:
    """The first block of each would be taken from the cache."""
    long = [prompt[:32] for load in plan(GRID, 0) for prompt in load.prompts if len(prompt) >= 32]
    assert len(set(long)) == len(long) > 100


def steps(count: int, seed: int = 0, noise: float = 0.1) -> list[SeenStep]:
    seeded = random.Random(seed)
    made = []
    for _ in range(count):
        seqs = seeded.randint(1, 32)
        shape = StepShape(seqs + seeded.choice((0, 0, 200)), seqs, seqs * seeded.randint(0, 900))
        seconds = 0.002 + 2e-5 * shape.tokens + 3e-5 * shape.seqs + 2e-7 * shape.context_tokens
        made.append(SeenStep(shape, seconds * seeded.uniform(1 - noise, 1 + noise)))
    return made


def test_steps_teach_a_profile_and_tell_how_well_it_knows_others() -> None:
    seen = steps(600)
    profile, error = fitted(seen, 0), held_out(seen, 0)
    assert profile.seconds(StepShape(232, 32, 10_000)) == pytest.approx(0.0096, rel=0.05)
    assert 0.04 < error.median < error.mean < 0.07 < error.upper < 0.12  # as the noise is: even, up to a tenth
    assert 1.05 < error.slower < 1.2
    assert held_out(steps(600, noise=0.4), 0).mean > 3 * error.mean
    assert fitted(seen, 0).state() == profile.state()


def test_steps_of_a_real_engine_are_told_better_than_any_line_in_tokens_could() -> None:
    """Held out here, not held out there. Recorded by `rose profile MODEL --max-num-seqs 64`: vLLM 0.32, two cores."""
    recorded = read_steps(Path(__file__).with_name("recorded_steps.jsonl"))
    tokens = np.array([[1.0, step.shape.tokens] for step in recorded])
    seconds = np.array([step.seconds for step in recorded])
    line, *_ = np.linalg.lstsq(tokens / seconds[:, None], np.ones(len(recorded)), rcond=None)
    missed_by_line = float(np.mean(np.abs(seconds / (tokens @ line) - 1)))
    error = held_out(recorded, 0)
    assert error.mean < 0.6 * missed_by_line
    assert error.median < 0.1
    assert error.upper < 0.3


def test_what_is_held_out_has_taught_nothing() -> None:
    """One prompt among batches: guessed in proportion, for whoever has not seen it."""
    seen = [SeenStep(StepShape(1), 0.01)] * 9 + [SeenStep(StepShape(1000), 0.02)]
    assert held_out(seen, 0).upper == pytest.approx(1 - 0.02 / 10, abs=0.01)


def test_too_few_steps_teach_nothing() -> None:
    with pytest.raises(EngineError, match="99 steps") as error:
        fitted(steps(STEPS_MIN - 1), 0)
    assert "--seconds" in error.value.to_do


def test_steps_are_read_as_they_were_written_and_one_cut_short_is_left_out(tmp_path: Path) -> None:
    seen, log = steps(20), StepLogWriter(tmp_path / "steps.jsonl")
    for step in seen:
        log.write(step)
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write("[12, 3")
    found = read_steps(tmp_path / "steps.jsonl")
    assert [step.shape for step in found] == [step.shape for step in seen]
    assert [step.shape for step in read_steps(tmp_path / "steps.jsonl", 15)] == [step.shape for step in seen[15:]]
    assert [step.seconds for step in found] == pytest.approx([step.seconds for step in seen], abs=1e-9)


@pytest.mark.parametrize("line", ["{}", "[1, 2, 3]", "[1, 2, 3, null]", "[1, 2, 3, 0.1, 5]", "nonsense", "7"])
def test_a_damaged_line_is_no_step(tmp_path: Path, line: str) -> None:
    (tmp_path / "steps.jsonl").write_text(f"[1, 1, 0, 0.001]\n{line}\n")
    with pytest.raises(EngineError, match="line 2"):
        read_steps(tmp_path / "steps.jsonl")


def test_no_file_is_no_steps(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No such file"):
        read_steps(tmp_path / "steps.jsonl")
