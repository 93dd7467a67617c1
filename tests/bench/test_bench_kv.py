"""What the bench of continuous task batching plays, and what it makes of it."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.kv import BENCH, OPEN, WORKING_SETS, compared
from bench.kv_play import Played
from bench.kv_tasks import CONTEXT_TOKENS, MIXES, Mix, Task, TaskTurn, findable_share, tasks_of, working_set_tokens
from bench.registry import benches
from bench.stats import MIN_PAIRS


def a_task(name: str, group: str, *turns: tuple[int, int]) -> Task:
    """Of turns that say and answer so many tokens."""
    return Task(name, group, 2, tuple(TaskTurn(tuple(range(5, 5 + said)), answer, 0.0) for said, answer in turns))


def test_tasks_are_the_same_for_a_seed_and_share_their_groups_prompt_alone() -> None:
    mix = Mix(groups=3, group_size=4)
    tasks = tasks_of(mix, 7)
    assert tasks == tasks_of(mix, 7) != tasks_of(mix, 8)
    assert len(tasks) == 12
    prompts = {
        task.group_id: {other.turns[0].said for other in tasks if other.group_id == task.group_id} for task in tasks
    }
    assert all(len(said) == 1 for said in prompts.values())
    assert len({task.turns[1].said for task in tasks if len(task.turns) > 1}) > 6


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_no_task_outgrows_its_context_and_each_has_a_turn(mix: Mix) -> None:
    tasks = tasks_of(mix, 0)
    assert all(task.turns and task.context_tokens <= CONTEXT_TOKENS for task in tasks)
    assert len(tasks) == mix.groups * mix.group_size


def test_a_working_set_is_what_contexts_hold_at_the_end_of_a_turn() -> None:
    assert working_set_tokens([a_task("a", "g", (10, 10), (20, 10))]) == (20 + 50) / 2
    assert working_set_tokens([a_task("a", "g", (10, 10))] * 3) == 60


def test_what_can_be_found_is_what_was_computed_before_in_whole_blocks() -> None:
    one = a_task("a", "g", (20, 5), (10, 5), (10, 5))
    # Of 20, 35 and 50 tokens asked for: nothing, 25 of which 16 are a block, 40 of which 32 are.
    assert findable_share([one], 16) == pytest.approx(48 / 105)
    # Another of its group finds its first block as well.
    assert findable_share([one, a_task("b", "g", (20, 5))], 16) == pytest.approx(64 / 125)


def played(tok_s: float, hit_rate: float) -> Played:
    return Played(1.0, tok_s, hit_rate, 0.0)


def a_round(noise: float = 0.0) -> dict[str, Played]:
    first = {f"first_come_{share:g}x": played(100 - 10 * abs(share - 1.5) + noise, 0.5) for share in OPEN}
    return first | {f"batched_{size}x": played(120.0, 0.8) for size in WORKING_SETS}


def test_each_working_set_is_held_against_the_best_with_no_more_tasks_open() -> None:
    found = compared([a_round()] * MIN_PAIRS, findable=0.9)
    assert found["baseline_open"] == found["baseline_open_4x"] == 1.5
    assert found["baseline_open_1x"] == 1
    assert found["throughput_ratio"] == pytest.approx(1.2)
    assert found["throughput_ratio_1x"] == pytest.approx(120 / 95)
    assert found["throughput_ratio_low"] == found["throughput_ratio_high"] == pytest.approx(1.2)
    assert found["hit_rate_ratio"] == pytest.approx(1.6)
    assert found["hit_rate_of_target"] == pytest.approx(1.6 / 1.58)
    assert compared([a_round()] * MIN_PAIRS, findable=0.75)["hit_rate_of_target"] == pytest.approx(1.6 / 1.5)
    assert "throughput_ratio_low" not in compared([a_round()], findable=0.9)


def test_the_best_of_the_baseline_is_chosen_over_all_rounds() -> None:
    odd = {**a_round(), "first_come_3x": played(500.0, 0.5)}
    assert compared([a_round(), a_round(1.0), odd], findable=0.9)["baseline_open"] == 1.5


def test_it_is_a_bench() -> None:
    assert benches()["kv"] is BENCH
    assert BENCH.left_out(Namespace()) == {}
