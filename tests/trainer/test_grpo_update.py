from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tiny_policy import a_group, a_trajectory, a_turn, tiny_policy

from rose.errors import TrainingError
from rose.records import Group, Segment, Trajectory, Turn
from rose.trainer.advantage import group_advantages
from rose.trainer.batch import pad
from rose.trainer.grpo import GrpoSettings, accumulate_gradients, token_losses, update
from rose.trainer.optimizer import OptimizerSettings, WarmUpAdamW
from rose.trainer.policy import Policy, TokenScores, changed_fraction
from rose.trainer.update_stats import TokenSums

SETTINGS = GrpoSettings()


def some_groups(seed: int = 5) -> list[Group]:
    draw = random.Random(seed)
    return [
        a_group(draw, [draw.choice([0.0, 1.0]) for _ in range(6)] + [0.0, 1.0], f"g{number}") for number in range(3)
    ]


def optimizer_of(policy: Policy, rate: float = 1e-3, warm_up_updates: int = 1) -> WarmUpAdamW:
    return WarmUpAdamW(policy.parameters(), OptimizerSettings(learning_rate=rate, warm_up_updates=warm_up_updates))


def plain_gradients(
    policy: Policy, segments: list[Segment], advantages: list[float], settings: GrpoSettings
) -> dict[str, torch.Tensor]:
    """The loss written as one reads it: token by token, one sequence at a time, in double precision sums."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for segment, advantage in zip(segments, advantages, strict=True):
        every = torch.log_softmax(policy.model(torch.tensor([segment.token_ids])).logits[0], -1)
        sampled = iter(segment.logprobs)
        for start, end in segment.outputs:
            for position in range(start, end):
                ratio = (every[position - 1, segment.token_ids[position]] - next(sampled)).exp()
                clipped = min(max(ratio, torch.tensor(1 - settings.clip_low)), torch.tensor(1 + settings.clip_high))
                total = total - torch.minimum(ratio * advantage, clipped * advantage).double()
                tokens += 1
    policy.model.zero_grad()
    (total / tokens).backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("cap", [1, 40, 100_000])
def test_micro_batches_give_the_gradients_of_a_plain_loop(cap: int) -> None:
    policy = tiny_policy()
    draw = random.Random(2)
    segments = [part for _ in range(9) for part in a_trajectory(draw, 0.0).segments()]
    advantages = [draw.uniform(-2, 2) for _ in segments]
    expected = plain_gradients(policy, segments, advantages, SETTINGS)
    policy.model.zero_grad()
    sums = TokenSums()
    accumulate_gradients(policy, segments, advantages, replace(SETTINGS, micro_batch_tokens=cap), sums)
    assert sums.tokens == sum(segment.output_tokens for segment in segments)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-2
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad / sums.tokens, expected[name], atol=1e-6, rtol=0)


def test_the_gradient_norm_is_that_of_the_mean_over_tokens() -> None:
    policy = tiny_policy()
    trained = group_advantages(some_groups()).trained
    rows = [(segment, advantage) for trajectory, advantage in trained for segment in trajectory.segments()]
    expected = plain_gradients(policy, [row[0] for row in rows], [row[1] for row in rows], SETTINGS)
    one = replace(SETTINGS, minibatches=1)
    stats = update(policy, optimizer_of(policy), some_groups(), one, random.Random(0))
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4)


def test_the_mismatch_is_measured_before_any_step() -> None:
    policy = tiny_policy()
    groups = [
        Group(group.group_id, tuple(_as_sampled_by(policy, trajectory) for trajectory in group.trajectories))
        for group in some_groups()
    ]
    stats = update(policy, optimizer_of(policy, rate=0.1), groups, SETTINGS, random.Random(0))
    assert stats.optimizer_steps == 2
    assert stats.ratio_max > 1.1  # the first step moved the policy far
    assert stats.logprob_mismatch_max < 1e-5


def test_the_clip_range_binds_only_where_it_would_be_exceeded() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5])
    advantage = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    losses = token_losses(TokenScores(ratio.log(), torch.zeros(5)), torch.zeros(5), advantage, SETTINGS)
    assert losses.tolist() == pytest.approx([-0.5, 0.8, -1.0, -1.28, 1.5])


def test_an_update_makes_good_answers_likelier() -> None:
    policy = tiny_policy()
    draw = random.Random(8)
    good, bad = a_trajectory(draw, 1.0, name="good"), a_trajectory(draw, 0.0, name="bad")
    members = tuple(_as_sampled_by(policy, trajectory) for trajectory in (good, bad))
    before = [_mean_logprob(policy, trajectory) for trajectory in members]
    stats = update(policy, optimizer_of(policy), [Group("g", members)], SETTINGS, random.Random(0))
    after = [_mean_logprob(policy, trajectory) for trajectory in members]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert stats.optimizer_steps == 1  # two trajectories are too few for two minibatches


def _mean_logprob(policy: Policy, trajectory: Trajectory) -> float:
    return float(policy.score(pad(trajectory.segments())).logprob_N.detach().mean())


def _as_sampled_by(policy: Policy, trajectory: Trajectory) -> Trajectory:
    logprobs = iter(policy.score(pad(trajectory.segments())).logprob_N.tolist())
    turns = tuple(replace(turn, logprobs=tuple(next(logprobs) for _ in turn.output_ids)) for turn in trajectory.turns)
    return replace(trajectory, turns=turns)


def test_statistics_on_policy_show_no_mismatch_no_clipping_and_all_accounts() -> None:
    policy = tiny_policy()
    draw = random.Random(4)
    groups = [
        Group(group.group_id, tuple(_as_sampled_by(policy, trajectory) for trajectory in group.trajectories))
        for group in [*some_groups(), a_group(draw, [1.0, 1.0], "dull")]
    ]
    stats = update(policy, optimizer_of(policy, rate=1e-9), groups, SETTINGS, random.Random(0))
    assert stats.logprob_mismatch_max < 1e-5
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert stats.clip_fraction == 0.0
    assert stats.kl == pytest.approx(0.0, abs=1e-6)
    assert 0.0 < stats.entropy < 3.5
    assert stats.optimizer_steps == 2
    assert len(stats.trained) == 24
    assert len(stats.zero_variance) == 2
    assert stats.left_out == ()
    assert stats.tokens == sum(trajectory.output_tokens for trajectory in stats.trained)


def test_a_wrong_log_prob_shows_as_mismatch_and_in_the_ratio() -> None:
    policy = tiny_policy()
    group = some_groups()[0]
    exact = [_as_sampled_by(policy, trajectory) for trajectory in group.trajectories]
    first = exact[0].turns[0]
    off = (first.logprobs[0] - 0.5, *first.logprobs[1:])
    wrong = replace(exact[0], turns=(replace(first, logprobs=off), *exact[0].turns[1:]))
    only = replace(SETTINGS, minibatches=1)
    stats = update(policy, optimizer_of(policy), [Group("g", (wrong, *exact[1:]))], only, random.Random(0))
    assert stats.logprob_mismatch_max == pytest.approx(0.5, abs=1e-4)
    assert stats.ratio_max == pytest.approx(2.718281828**0.5, abs=1e-3)
    assert stats.clip_fraction == pytest.approx(1 / stats.tokens)


def test_groups_without_variance_change_nothing() -> None:
    policy = tiny_policy()
    before = policy.weights()
    dull = a_group(random.Random(1), [1.0, 1.0, 1.0])
    stats = update(policy, optimizer_of(policy), [dull], SETTINGS, random.Random(0))
    assert (stats.optimizer_steps, stats.tokens, stats.loss) == (0, 0, 0.0)
    assert stats.zero_variance == dull.trajectories
    assert changed_fraction(before, policy.weights()) == 0.0


@pytest.mark.parametrize("broken", ["engine", "policy"])
def test_what_is_not_finite_is_an_error_before_any_step(broken: str) -> None:
    policy = tiny_policy()
    groups = some_groups()
    if broken == "engine":
        draw = random.Random(1)
        members = tuple(
            a_trajectory(draw, reward, turns=(a_turn(draw, logprob=float("nan")),)) for reward in (0.0, 1.0)
        )
        groups = [Group("g", members)]
    else:
        with torch.no_grad():
            policy.parameters()[0][3, 0] = float("nan")
    before = policy.weights()
    with pytest.raises(TrainingError, match=f"nan: the {broken}'s log-probs"):
        update(policy, optimizer_of(policy), groups, SETTINGS, random.Random(0))
    for name, tensor in policy.weights().items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0))


def test_log_probs_too_far_apart_for_a_ratio_are_named() -> None:
    draw = random.Random(1)
    members = tuple(a_trajectory(draw, reward, turns=(a_turn(draw, logprob=-200.0),)) for reward in (0.0, 1.0))
    policy = tiny_policy()
    with pytest.raises(TrainingError, match="inf: policy and engine are too far apart"):
        update(policy, optimizer_of(policy), [Group("g", members)], SETTINGS, random.Random(0))


def test_a_gradient_that_overflows_is_an_error_before_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    before = policy.weights()
    policy.parameters()[-1].register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(TrainingError, match="gradient"):
        update(policy, optimizer_of(policy), some_groups(), SETTINGS, random.Random(0))
    assert changed_fraction(before, policy.weights()) == 0.0


def test_a_trajectory_in_segments_is_trained_as_rows_of_one_advantage() -> None:
    policy = tiny_policy()
    draw = random.Random(1)
    turns: tuple[Turn, ...] = (a_turn(draw), a_turn(draw, starts_segment=True))
    members = (a_trajectory(draw, 1.0, turns=turns), a_trajectory(draw, 0.0))
    stats = update(policy, optimizer_of(policy), [Group("g", members)], SETTINGS, random.Random(0))
    assert stats.tokens == sum(trajectory.output_tokens for trajectory in members)


def test_the_same_seed_gives_the_same_update_and_a_restored_optimizer_goes_on_exactly() -> None:
    def run(updates: int, resume_after: int | None) -> dict[str, torch.Tensor]:
        policy = tiny_policy()
        optimizer = optimizer_of(policy, warm_up_updates=3)
        rng = random.Random(0)
        for number in range(updates):
            if number == resume_after:
                saved, weights = optimizer.state_dict(), policy.weights()
                policy = tiny_policy(seed=9)
                policy.load_weights(weights)
                optimizer = optimizer_of(policy, warm_up_updates=3)
                optimizer.load_state_dict(saved)
            update(policy, optimizer, some_groups(number), SETTINGS, rng)
        return policy.weights()

    straight, resumed = run(3, None), run(3, 2)
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name])


def test_the_rate_rises_linearly_and_stays() -> None:
    policy = tiny_policy()
    optimizer = WarmUpAdamW(policy.parameters(), OptimizerSettings(learning_rate=1.0, warm_up_updates=4))
    rates = []
    for _ in range(6):
        optimizer.begin_update()
        rates.append(optimizer.rate)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
