from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
import torch

import rose.demo.warmstart
from rose.demo.warmstart.lessons import FEATURES, teach, to_lesson
from rose.demo.warmstart.model import build_model, build_tokenizer
from rose.demo.warmstart.sampler import play_episodes
from rose.demo.warmstart.transcripts import Teacher, Transcript, play, shortest_moves
from rose.env.chat import ChatRenderer
from rose.env.frozen_lake import FrozenLake
from rose.records import Group, Trajectory
from rose.trainer.batch import pad
from rose.trainer.grpo import GrpoSettings, update
from rose.trainer.optimizer import OptimizerSettings, WarmUpAdamW
from rose.trainer.policy import Policy, load_policy, load_tokenizer

MODEL = Path(rose.demo.warmstart.__file__).parent / "model"


@cache
def renderer() -> ChatRenderer:
    return ChatRenderer(load_tokenizer(MODEL))


def sampled(policy: Policy, seeds: list[int], chance_seed: int, temperature: float = 1.0) -> list[Trajectory]:
    chance = torch.Generator().manual_seed(chance_seed)
    return play_episodes(policy, renderer(), FrozenLake, seeds, chance, temperature=temperature)


def success(episodes: list[Trajectory]) -> float:
    return sum(episode.success for episode in episodes) / len(episodes)


def test_the_shipped_checkpoint_is_mediocre_and_knows_better() -> None:
    policy = load_policy(MODEL)
    at_random, greedy = (sampled(policy, list(range(4_000_000, 4_000_128)), 1, t) for t in (1.0, 0.0))
    assert 0.04 < success(at_random) < 0.22
    assert 0.25 < success(greedy) < 0.6
    actions = sum(len(episode.turns) for episode in at_random)
    assert sum(episode.malformed_actions for episode in at_random) < 0.03 * actions


def test_the_shipped_folder_names_no_path_of_the_machine_that_built_it() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert "/" not in (MODEL / name).read_text().replace("</", "")


def test_log_probs_of_the_sampler_are_those_of_the_trainer() -> None:
    policy = load_policy(MODEL)
    episodes = sampled(policy, list(range(24)), 3)
    assert len({len(episode.turns) for episode in episodes}) > 2  # ragged, or the test shows nothing
    batch = pad([segment for episode in episodes for segment in episode.segments()])
    torch.testing.assert_close(policy.score(batch).logprob_N, batch.sampled_logprob_N, atol=2e-5, rtol=0)


def test_the_teacher_goes_shortest_ways_around_holes() -> None:
    grid = ("SFHF", "FFFF", "HFHF", "FFFG")
    assert set(shortest_moves(grid, (0, 0))) == {"right", "down"}
    assert shortest_moves(grid, (0, 1)) == ["down"]
    assert set(shortest_moves(grid, (1, 1))) == {"down", "right"}


def test_a_perfect_teacher_always_arrives_and_a_malformed_one_never() -> None:
    draw = random.Random(0)
    assert all(transcript.success for transcript in play(Teacher(skill=1.0, malformed=0.0), range(40), draw))
    assert not any(transcript.success for transcript in play(Teacher(skill=1.0, malformed=1.0), range(5), draw))


def some_transcripts(count: int) -> list[Transcript]:
    return list(play(Teacher(skill=0.9), range(count), random.Random(0)))


def test_a_lesson_is_what_a_rollout_would_see() -> None:
    transcript = some_transcripts(1)[0]
    lesson = to_lesson(transcript, renderer())
    answered = [token for token, own in zip(lesson.token_ids, lesson.answered, strict=True) if own]
    end = "<|im_end|>"
    assert renderer().decode(answered) == end.join(transcript.answers) + end
    assert renderer().decode(lesson.token_ids).count("<|im_start|>user") == len(transcript.observations)


def test_teaching_is_deterministic_and_lowers_the_loss() -> None:
    transcripts = some_transcripts(24)
    tokenizer = build_tokenizer("\n".join((*t.observations, *t.answers)) for t in transcripts)
    chat = ChatRenderer(tokenizer)

    def losses() -> list[float]:
        policy = Policy(build_model(tokenizer, seed=3))
        return teach(policy, FEATURES, [to_lesson(t, chat) for t in transcripts] * 4, 8, random.Random(1))

    first = losses()
    assert first == losses()
    assert first[-1] < 0.9 * first[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_updates_make_the_goal_half_as_likely_again() -> None:
    policy, actor = load_policy(MODEL), load_policy(MODEL)
    optimizer = WarmUpAdamW(policy.parameters(), OptimizerSettings())
    rng = random.Random(0)
    shares: list[float] = []
    for step in range(10):
        seeds = [10_000_000 + step * 16 + attempt // 8 for attempt in range(128)]
        episodes = sampled(actor, seeds, step)
        groups = [Group(str(number), tuple(episodes[number * 8 : number * 8 + 8])) for number in range(16)]
        update(policy, optimizer, groups, GrpoSettings(), rng)
        actor.load_weights(policy.weights())
        shares.append(success(episodes))
    assert sum(shares[-3:]) > 1.5 * sum(shares[:3])
