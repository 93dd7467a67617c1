"""What a co-served run proved, in one sentence with its numbers.

Invariants
- Only what was measured is said; a figure that is missing is left out, and without one there is no sentence.
- What went badly is said in the same place and as plainly as what went well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rose.report.coserving import Serving
from rose.report.model import RunReport
from rose.report.words import kept, percent, ratio


@dataclass(frozen=True, slots=True)
class Piece:
    """A few words of the sentence; a figure is shown strong."""

    text: str
    figure: bool = False


def claim(report: RunReport) -> tuple[Piece, ...]:
    """The sentence in pieces; empty for a run that was not watched beside a serving engine."""
    if report.serving is None:
        return ()
    clauses = [clause for clause in (_success(report), _guest(report), _latency(report.serving)) if clause]
    pieces: list[Piece] = []
    for number, clause in enumerate((*clauses, _slo(report.serving))):
        if number:
            pieces.append(Piece("; " if number == len(clauses) else ", "))
        pieces.extend(clause)
    first = pieces[0]
    pieces[0] = Piece(first.text[:1].upper() + first.text[1:], first.figure)
    return (*pieces, Piece("."))


def _success(report: RunReport) -> list[Piece]:
    if report.success_gain is None:
        return []
    went = "rose" if report.success_gain > 0 else "fell" if report.success_gain < 0 else "stayed"
    ends = f"from {percent(report.success_before or 0.0)} to {percent(report.success_after or 0.0)}"
    return [Piece(f"held-out success {went} "), Piece(ends, figure=True)]


def _guest(report: RunReport) -> list[Piece]:
    if report.guest_share is None:
        return []
    return [Piece(percent(report.guest_share), figure=True), Piece(" of the rollout came from lent serving time")]


def _latency(serving: Serving) -> list[Piece]:
    def clauses() -> Iterator[Piece]:
        for name, words in (("ttft_p95", "time to first token"), ("tpot_p95", "time per token")):
            found = serving.ratios[name]
            if found is not None:
                yield Piece(ratio(found), figure=True)
                yield Piece(f" the p95 {words}")

    pieces = list(clauses())
    if len(pieces) == 4:
        pieces.insert(2, Piece(" and "))
    return [Piece("serving saw "), *pieces, Piece(" of serving alone")] if pieces else []


def _slo(serving: Serving) -> list[Piece]:
    share = serving.shared.slo_kept
    if share is None:
        return [Piece("no request judged the SLO", figure=True)]
    figure = Piece(kept(share), figure=True)
    if serving.slo_met:
        return [Piece("the SLO was kept by "), figure, Piece(" of requests")]
    return [Piece("the SLO was missed", figure=True), Piece(": only "), figure, Piece(" of requests kept it")]
