"""Geometry of the token ledger, which the report draws without a script, in percent of its width."""

from __future__ import annotations

from dataclasses import dataclass

from rose.report.model import LedgerSummary

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
