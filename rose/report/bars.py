"""Geometry of what the report draws without a script: the token ledger and the timeline, in percent of their width."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rose.report.model import LedgerSummary, Phase

MEANINGS = {
    "trained": ("blue", "Entered an update."),
    "evaluation": ("sky", "Sampled to measure success, never trained."),
    "zero-variance": ("grey", "Every attempt of the group scored the same: nothing to learn from."),
    "truncated": ("orange", "The episode ran out of turns or context."),
    "stale": ("yellow", "Sampled by a version too old to train on."),
    "environment-failed": ("purple", "The environment failed."),
    "aborted": ("vermilion", "Cut off on purpose, or at the end of the run."),
    "unreceived": ("black", "Sampled by an engine that was lost before they arrived."),
    "in-flight": ("green", "Still under way when the report was written."),
}
PHASE_COLOURS = {"rollout": "blue", "train": "orange", "publish": "green", "apply": "purple", "evaluation": "sky"}
THINNEST_PERCENT = 0.15
"""A stretch of the timeline is never drawn thinner than this, or a short publish would vanish."""


@dataclass(frozen=True, slots=True)
class AccountBar:
    """One account of the ledger; `left` and `width` are percent of all generated tokens."""

    name: str
    colour: str
    meaning: str
    tokens: int
    left: float
    width: float


def account_bars(ledger: LedgerSummary) -> list[AccountBar]:
    """Known accounts in a fixed order, then any other by name; empty ones have no width but are told all the same."""
    order = list(MEANINGS)
    names = sorted(ledger.accounts, key=lambda name: (order.index(name) if name in MEANINGS else len(order), name))
    whole = max(1, ledger.generated, sum(ledger.accounts.values()))
    bars: list[AccountBar] = []
    left = 0.0
    for name in names:
        colour, meaning = MEANINGS.get(name, ("grey", ""))
        tokens = ledger.accounts[name]
        width = max(0.0, 100 * tokens / whole)
        bars.append(AccountBar(name, colour, meaning, tokens, left, width))
        left += width
    return bars


@dataclass(frozen=True, slots=True)
class Lane:
    """All stretches of one phase as (left, width) in percent of the run, and their sum in seconds."""

    name: str
    colour: str
    total_s: float
    stretches: list[tuple[float, float]]


def lanes(phases: tuple[Phase, ...], wall_s: float) -> list[Lane]:
    """One lane per phase name, in order of first start."""
    whole = _whole(phases, wall_s)
    found: dict[str, list[Phase]] = {}
    for phase in sorted(phases, key=lambda phase: phase.start_s):
        found.setdefault(phase.name, []).append(phase)
    return [
        Lane(
            name,
            PHASE_COLOURS.get(name, "grey"),
            sum(phase.end_s - phase.start_s for phase in group),
            [
                (100 * phase.start_s / whole, max(THINNEST_PERCENT, 100 * (phase.end_s - phase.start_s) / whole))
                for phase in group
            ],
        )
        for name, group in found.items()
    ]


def ticks(phases: tuple[Phase, ...], wall_s: float) -> list[tuple[float, float]]:
    """(percent, seconds) of round times along the run, about five of them."""
    whole = _whole(phases, wall_s)
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
    step = next((step for step in steps if whole / step <= 6), 3600 * math.ceil(whole / 3600 / 6))
    return [(100 * at / whole, at) for at in range(0, int(whole) + 1, step)]


def _whole(phases: tuple[Phase, ...], wall_s: float) -> float:
    return max(1e-9, wall_s, *(phase.end_s for phase in phases))
