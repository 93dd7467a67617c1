"""What the page says, from what was seen: words, charts, runs, services."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.dashboard.charts import SERIES_MAX, charts, series_id
from rose.dashboard.increments import KEYED, increment
from rose.dashboard.lending import lending
from rose.dashboard.page_state import page_state
from rose.dashboard.panels import runs, service_row
from rose.dashboard.tiles import Tile, share, tiles
from rose.observer.measures import SeriesKey, Source
from rose.observer.observer import View
from rose.observer.services import Life, Service
from rose.run_names import short_names
from rose.status import OpenWait, Page, Part

DEMO, EXECUTOR, RUN = (f"{name}-20260801-120000-ab1{n}" for n, name in enumerate(("demo", "executor", "lake")))


def service(
    service_id: str,
    parts: dict[str, tuple[str, str]] | None = None,
    facts: dict[str, Any] | None = None,
    life: Life = Life.LIVE,
    waits: list[OpenWait] | None = None,
) -> Service:
    page = Page(
        run_id=service_id,
        pid=7,
        output="/out",
        started_s=1.0,
        written_s=5.0,
        write_failures=0,
        parts=[
            Part(name=name, state=state, detail=detail, since_s=2.0) for name, (state, detail) in (parts or {}).items()
        ],
        facts=facts or {},
        waits=waits or [],
    )
    return Service(service_id, life, page, "", 6.0)


def key(service_id: str, figure: str, label: str = "", target: str = "") -> SeriesKey:
    return SeriesKey(Source(service_id, target), figure, label)


LENT = {"guest": ("lent", "12 requests may be on it"), "scheduler": ("reached", "")}


def sentence(
    parts: dict[str, tuple[str, str]], latest: dict[SeriesKey, float] | None = None, **more: Any
) -> tuple[bool, str]:
    one = service(EXECUTOR, parts, **more)
    (said,) = lending({EXECUTOR: one}, latest or {}, {})
    return said.lent, said.sentence


def test_what_is_lent_is_said_with_its_figures() -> None:
    latest = {
        key(EXECUTOR, "gate"): 0.5,
        key(EXECUTOR, "running", "guest"): 1.0,
        key(EXECUTOR, "slots"): 12.0,
        key(EXECUTOR, "guest tokens"): 1234.0,
    }
    assert sentence(LENT, latest) == (
        True,
        "Lent: the gate was open 50 % of the last second, the guest runs 1 request, up to 12 may be on it, "
        "1,234 tokens/s.",
    )
    assert sentence(LENT) == (True, "Lent: metrics to come.")


@pytest.mark.parametrize(
    ("parts", "more", "words"),
    [
        ({"guest": ("held back", "serving leaves no slack, for 3 s now")}, {}, "serving leaves no slack, for 3 s now."),
        ({"guest": ("waits for weights", "")}, {}, "the guest is not ready; it says: waits for weights."),
        (LENT | {"scheduler": ("no answer", "refused")}, {}, "the scheduler does not answer. refused"),
        (LENT, {"life": Life.STALE}, "its executor is silent, and without that the guest shuts its own gate."),
    ],
)
def test_why_nothing_is_lent(parts: dict[str, tuple[str, str]], more: dict[str, Any], words: str) -> None:
    is_lent, said = sentence(parts, **more)
    assert not is_lent
    assert said == f"Nothing is lent: {words}"


@pytest.mark.parametrize("life", [Life.DEAD, Life.ENDED])
def test_without_an_executor_it_says_how_to_start_one(life: Life) -> None:
    gone, other = service(EXECUTOR, LENT, life=life), service(DEMO, {"serving": ("healthy", "")})
    (said,) = lending({EXECUTOR: gone, DEMO: other}, {}, {})
    assert not said.lent
    assert "rose executor --help" in said.sentence


def told(latest: dict[SeriesKey, float]) -> dict[str, Tile]:
    return {tile.label: tile for tile in tiles(latest)}


def test_tiles_say_whether_the_slo_is_kept() -> None:
    latest = {
        key(DEMO, "kept", "ttft", "load"): 0.9996,
        key(DEMO, "kept", "tpot", "load"): 0.94,
        key(DEMO, "ttft p99", target="load"): 0.2,
        key(DEMO, "tpot p99", target="load"): 0.0305,
        key(EXECUTOR, "slo", "ttft"): 0.3,
        key(EXECUTOR, "slo", "tpot"): 0.03,
    }
    shown = told(latest)
    assert (shown["TTFT within SLO"].value, shown["TTFT within SLO"].tone) == ("99.9 %", "good")
    assert (shown["TPOT within SLO"].value, shown["TPOT within SLO"].tone) == ("94 %", "bad")
    assert shown["Serving TTFT p99"] == Tile("Serving TTFT p99", "200 ms", "of at most 300 ms", "good")
    assert shown["Serving TPOT p99"].tone == "bad"


def test_tiles_take_the_worst_of_several_and_say_so() -> None:
    latest = {key(DEMO, "ttft p99", target="load"): 0.2, key(RUN, "ttft p99", target="load"): 0.4}
    assert told(latest)["Serving TTFT p99"] == Tile("Serving TTFT p99", "400 ms", "no SLO is set; worst of 2", "plain")


def test_tiles_of_a_rollout() -> None:
    latest = {
        key(RUN, "generated"): 1000.0,
        key(RUN, "gap"): 0.0,
        key(RUN, "engine tokens", target="engine-0"): 300.0,
        key(DEMO, "engine tokens", target="serving"): 5000.0,
        key(EXECUTOR, "guest tokens"): 100.0,
        key(RUN, "success", "train"): 0.5,
    }
    shown = told(latest)
    assert (shown["Rollout tokens/s"].value, shown["Rollout tokens/s"].says) == ("400", "25 % of them lent")
    assert (shown["Success"].value, shown["Success"].says) == ("50 %", "in training")
    evaluated = told({**latest, key(RUN, "success", "evaluation"): 0.25})
    assert evaluated["Success"].says == "in training; held-out when last tried: 25 %"
    assert told({key(RUN, "success", "evaluation"): 0.25})["Success"].value == "25 %"
    assert shown["Tokens in no account"].tone == "good"
    assert told({**latest, key(RUN, "gap"): 12.0})["Tokens in no account"].tone == "plain"
    assert told({}) == {}


@given(st.floats(0.0, 1.0))
def test_a_share_is_whole_only_if_nothing_is_missing(value: float) -> None:
    assert (share(value) == "100 %") == (value == 1.0)


def test_charts_name_their_lines_and_leave_none_out_silently() -> None:
    known = [key(f"lake-20260801-120000-{n:04x}", "success", "train") for n in range(SERIES_MAX + 3)]
    (chart,) = charts(known, {}, short_names(one.source.service for one in known))
    assert len(chart.lines) == SERIES_MAX
    assert chart.left_out == 3
    assert chart.lines[0].label == "lake 0000 train"
    assert len({line.series for line in chart.lines}) == SERIES_MAX
    assert charts([], {}, {}) == []


def test_of_many_series_those_that_speak_now_are_drawn() -> None:
    known = [key(f"lake-20260801-120000-{n:04x}", "success", "train") for n in range(SERIES_MAX + 3)]
    (chart,) = charts(known, {known[-1]: 0.5, known[-2]: 0.5}, {})
    assert [line.series for line in chart.lines] == [series_id(one) for one in (*known[: SERIES_MAX - 2], *known[-2:])]
    assert chart.left_out == 3


def test_the_slo_is_a_line_across_the_charts_of_latency() -> None:
    known = [key(DEMO, f"ttft {one}", target="load") for one in ("p50", "p95", "p99")]
    (chart,) = charts(known, {key(EXECUTOR, "slo", "ttft"): 0.3}, {})
    assert [limit.value for limit in chart.limits] == [0.3]
    assert [line.label for line in chart.lines] == ["p50", "p99"]


def test_a_serving_engine_is_no_rollout_engine() -> None:
    known = [
        key(RUN, "generated"),
        key(RUN, "engine tokens", target="engine-0"),
        key(DEMO, "engine tokens", target="serving"),
        key(EXECUTOR, "guest tokens"),
    ]
    (chart,) = charts(known, {}, short_names([RUN, DEMO, EXECUTOR]))
    assert [line.label for line in chart.lines] == ["engine-0, dedicated", "executor, lent"]
    assert [line.colour for line in chart.lines] == ["green", "orange"]
    assert chart.lines[0].series == series_id(known[1])


def test_a_run_says_how_far_behind_each_engine_is() -> None:
    services = {
        EXECUTOR: service(EXECUTOR, LENT, {"scheduler": "here"}),
        DEMO: service(DEMO, LENT, {"scheduler": "elsewhere"}),
        RUN: service(RUN, {"engine-0": ("healthy", "")}, {"step": 3, "steps": 9, "version": 4, "scheduler": "here"}),
    }
    latest = {
        key(RUN, "version", "engine-0"): 4.0,
        key(RUN, "engine tokens", target="engine-0"): 99.6,
        key(EXECUTOR, "guest version"): 2.0,
        key(DEMO, "guest version"): 1.0,
        key(RUN, "account", "trained"): 70.0,
        key(RUN, "account", "in-flight"): 30.0,
        key(RUN, "account", "unheard of"): 1.0,
        key(RUN, "gap"): 0.0,
    }
    (run,) = runs(services, latest, {}, short_names(services))
    assert run["engines"] == [
        {"name": "engine-0", "kind": "dedicated", "state": "healthy", "version": 4.0, "tokens_s": 100, "lag": 0},
        {"name": "executor", "kind": "lent", "state": "lent", "version": 2.0, "tokens_s": None, "lag": 2},
    ]
    assert run["accounts"] == [["trained", 70.0], ["in-flight", 30.0]]


def test_a_run_that_ended_is_told_with_its_last_figures() -> None:
    told = {key(RUN, "account", "trained"): 70.0, key(RUN, "version", "engine-0"): 4.0}
    facts = {"step": 9, "steps": 9, "version": 4}
    for life, accounts in ((Life.ENDED, [["trained", 70.0]]), (Life.LIVE, [])):
        (run,) = runs({RUN: service(RUN, facts=facts, life=life)}, {}, told, {})
        assert run["accounts"] == accounts
        assert len(run["engines"]) == len(accounts)


def test_a_service_is_told_without_ages_and_with_its_troubles() -> None:
    waits = [OpenWait(what="turn", whom=f"engine-0 {n}", since_s=1.0 + n, deadline_s=61.0 - n) for n in range(3)]
    one = service(RUN, {"trainer": ("rollout", "")}, {"step": 1}, waits=waits)
    row = service_row(one, {Source(RUN, "engine-0"): "refused", Source(DEMO): "other"}, {RUN: "lake"})
    assert row["unanswered"] == ["engine-0: refused"]
    assert row["waits"] == [{"what": "turn", "whom": "engine-0 0 and 2 more", "since_s": 1.0, "deadline_s": 59.0}]
    assert row["heard_s"] is None
    assert service_row(service(RUN, life=Life.STALE), {}, {})["heard_s"] == 5.0
    assert service_row(Service(RUN, Life.STALE, None, "no status written yet", 1.0), {}, {})["problem"]


def test_it_says_when_nothing_runs_but_lookers_on() -> None:
    looker = service("dashboard-20260801-120000-abcd", {"dashboard": ("serving", "")})
    assert page_state(View(1.0, {}, {}, {}), [], {})["idle"]
    assert page_state(View(1.0, {looker.service_id: looker}, {}, {}), [], {})["idle"]
    assert not page_state(View(1.0, {looker.service_id: looker, RUN: service(RUN)}, {}, {}), [], {})["idle"]


def applied(state: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """What the page does, in `feed.js`."""
    entries = {**state[KEYED], **change.get(KEYED, {})}
    return {**state, **change, KEYED: {name: entry for name, entry in entries.items() if entry is not None}}


states = st.fixed_dictionaries(
    {
        "idle": st.booleans(),
        "tiles": st.lists(st.integers(0, 2), max_size=2),
        "services": st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
    }
)


@given(st.lists(states, min_size=1, max_size=6))
def test_increments_lead_to_what_the_whole_state_would_say(told: list[dict[str, Any]]) -> None:
    held = told[0]
    for before, after in pairwise(told):
        change = increment(before, after)
        assert before != after or change == {}
        held = applied(held, change)
        assert held == after
