"""The top line: the few figures that say whether all is well. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rose.dashboard.names import of_figure
from rose.observer.measures import SeriesKey, slo_s

Tone = Literal["good", "warn", "bad", "plain"]
OBJECTIVE = 0.99


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure in words; `says` is the small print below it."""

    label: str
    value: str
    says: str
    tone: Tone = "plain"


def tiles(latest: Mapping[SeriesKey, float]) -> list[Tile]:
    """Those that can be told now."""
    made = [
        _kept(latest, "ttft"),
        _kept(latest, "tpot"),
        _percentile(latest, "ttft"),
        _percentile(latest, "tpot"),
        _guest_compute(latest),
        _rollout(latest),
        _success(latest),
        _ledger(latest),
    ]
    return [tile for tile in made if tile is not None]


def share(value: float) -> str:
    """A share in words that never rounds what is missing away."""
    text = f"{100 * value:.1f}" if value < 0.9995 or value == 1 else "99.9"
    return f"{text.removesuffix('.0')} %"


def milliseconds(value_s: float) -> str:
    return f"{1e3 * value_s:.1f} ms" if value_s < 0.01 else f"{1e3 * value_s:.0f} ms"


def _kept(latest: Mapping[SeriesKey, float], what: str) -> Tile | None:
    found = [value for key, value in of_figure(latest, "kept").items() if key.label == what]
    if not found:
        return None
    worst = min(found)
    tone: Tone = "good" if worst >= OBJECTIVE else "warn" if worst >= OBJECTIVE - 0.04 else "bad"
    return Tile(f"{what.upper()} within SLO", share(worst), _of("of the requests of 5 minutes", found), tone)


def _percentile(latest: Mapping[SeriesKey, float], what: str) -> Tile | None:
    found = list(of_figure(latest, f"{what} p99").values())
    if not found:
        return None
    worst, bound = max(found), slo_s(latest, what)
    if bound is None:
        return Tile(f"Serving {what.upper()} p99", milliseconds(worst), _of("no SLO is set", found))
    says = _of(f"of at most {milliseconds(bound)}", found)
    return Tile(f"Serving {what.upper()} p99", milliseconds(worst), says, "good" if worst <= bound else "bad")


def _guest_compute(latest: Mapping[SeriesKey, float]) -> Tile | None:
    shares = of_figure(latest, "compute")
    guests = [value for key, value in shares.items() if key.label == "guest"]
    serving = [value for key, value in shares.items() if key.label == "serving"]
    if not guests:
        return None
    says = f"serving computes {share(_mean(serving))}" if serving else "of the time"
    return Tile("Guest computes", share(_mean(guests)), _of(says, guests, "mean"))


def _rollout(latest: Mapping[SeriesKey, float]) -> Tile | None:
    lent = list(of_figure(latest, "guest tokens").values())
    runs = {key.source.service for key in of_figure(latest, "generated")}
    own = [value for key, value in of_figure(latest, "engine tokens").items() if key.source.service in runs]
    if not (lent or own):
        return None
    total = sum(lent) + sum(own)
    says = f"{share(sum(lent) / total)} of them lent" if total and lent else "no engine is lent" if not lent else "idle"
    return Tile("Rollout tokens/s", f"{total:,.0f}", says)


def _success(latest: Mapping[SeriesKey, float]) -> Tile | None:
    """Of training, which is new with each step; held-out tasks may have been tried long ago."""
    found = of_figure(latest, "success")
    train = [value for key, value in found.items() if key.label == "train"]
    held_out = [value for key, value in found.items() if key.label == "evaluation"]
    if not train:
        return (
            Tile("Success", share(_mean(held_out)), _of("of held-out episodes", held_out, "mean")) if held_out else None
        )
    says = f"in training; held-out when last tried: {share(_mean(held_out))}" if held_out else "in training"
    return Tile("Success", share(_mean(train)), _of(says, train, "mean"))


def _ledger(latest: Mapping[SeriesKey, float]) -> Tile | None:
    gaps = list(of_figure(latest, "gap").values())
    if not gaps:
        return None
    gap = sum(gaps)
    if gap == 0:
        return Tile("Tokens in no account", "0", "every token is accounted for", "good")
    return Tile("Tokens in no account", f"{gap:,.0f}", "on their way while requests run")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _of(says: str, found: Sequence[float], how: str = "worst") -> str:
    return says if len(found) == 1 else f"{says}; {how} of {len(found)}"
