"""Figures and outcomes in words, the same in the terminal and on the page."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

from rose.report.coserving import Serving
from rose.report.model import Evaluation, RunReport


def summary_lines(report: RunReport, out_dir: Path | None) -> list[str]:
    """What came of a run, in a few short lines of plain text; `out_dir` is None if the report could not be written."""
    lines = [f"{report.name} {report.outcome} after {duration(report.wall_s)}"]
    if report.cause:
        lines.append(f"  cause      {report.cause}")
    if report.evaluations:
        lines.append(f"  before     {evaluation_words(report.evaluations[0])}")
    if report.success_gain is not None:
        lines.append(f"  after      {evaluation_words(report.evaluations[-1])}")
        lines.append(f"  gain       {100 * report.success_gain:+.1f} points")
    if report.guest_share:
        lines.append(f"  lent       {percent(report.guest_share)} of all sampled tokens came from lent engines")
    if report.serving is not None:
        lines.append(f"  serving    {serving_words(report.serving)}")
    parity = "not checked"
    if report.parity_max is not None:
        parity = f"{tiny(report.parity_max)}, limit {tiny(report.parity_tolerance)}"
    lines.append(f"  weights    {report.versions_published} versions published, parity {parity}")
    ledger = report.ledger
    kept = "all accounted for" if ledger.gap == 0 else f"{ledger.gap:,} in no account"
    lines.append(f"  tokens     {ledger.generated:,} generated, {kept}")
    lines.extend(f"  ledger     {violation}" for violation in ledger.violations)
    lines.extend(f"  alarm      {alarm.what}" for alarm in report.alarms)
    failures = report.environment_failures
    if failures:
        often = max(failures, key=lambda cause: failures[cause])
        lines.append(f"  failed     {sum(failures.values())} episodes by their environment, most often: {often}")
    if report.engine_restarts:
        last = report.engine_restarts[-1]
        lines.append(
            f"  restarts   {len(report.engine_restarts)} of an engine, the last: {last.engine_id} {last.cause}"
        )
    lines.append(f"  report     {out_dir / 'report.html' if out_dir else 'could not be written'}")
    return lines


def evaluation_words(evaluation: Evaluation) -> str:
    low, high = evaluation.success_ci95
    words = f"{percent(evaluation.success)} ({percent(low)} to {percent(high)}) of {evaluation.episodes} episodes"
    return f"{words}, {evaluation.failed} more failed" if evaluation.failed else words


def serving_words(serving: Serving) -> str:
    ttft, tpot = serving.ratios["ttft_p95"], serving.ratios["tpot_p95"]
    words = f"p95 of the first token {_ratio(ttft)} of alone, per token {_ratio(tpot)}"
    if serving.shared.slo_kept is None:
        return f"{words}; no request judged the SLO"
    verdict = "kept" if serving.slo_met else "MISSED"
    return f"{words}; SLO {verdict}: {kept(serving.shared.slo_kept)} of requests within it"


def _ratio(value: float | None) -> str:
    return "–" if value is None else ratio(value)


def duration(elapsed_s: float) -> str:
    """1:05 for minutes and seconds, 1:01:05 from an hour on."""
    minutes, rest = divmod(int(elapsed_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %" if fraction in (0.0, 1.0) or fraction >= 0.095 else f"{100 * fraction:.1f} %"


def kept(fraction: float) -> str:
    """A share that was kept, to a tenth of a percent and never rounded up: 99.96 % is not 100 %."""
    return "100 %" if fraction == 1 else f"{math.floor(1000 * fraction) / 10:.1f} %"


def ratio(value: float) -> str:
    """Of two measured times, as 1.03×."""
    return f"{value:.2f}×"


def clock(at_s: float) -> str:
    """A moment as `duration` says it, with its sign before the run began."""
    return f"−{duration(-at_s)}" if at_s <= -1 else duration(at_s)


def seconds(value: float | None) -> str:
    """To a tenth of a second, or a hundredth below one second; a dash where it was not measured."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"


def milliseconds(value: float | None) -> str:
    """With three digits that count, whole from 100 ms on; a dash where it was not measured."""
    if value is None:
        return "–"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def tiny(value: float) -> str:
    """1.7e-5, and 1e-4 rather than 1.0e-4."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def moment(iso: str) -> str:
    """An ISO time as 2026-08-01 12:03:44 UTC; anything else as it is."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return iso
