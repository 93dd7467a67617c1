"""What services are called where people read."""

from __future__ import annotations

from rose.run_names import short_name, short_names

LAKE, OTHER, EXECUTOR = "lake-20260801-120000-ab12", "lake-20260801-120100-ffff", "executor-20260801-120000-0a0a"


def test_a_name_is_its_id_without_what_keeps_ids_apart() -> None:
    assert short_name("big-lake-20260801-120000-ab12") == "big-lake"
    assert [short_name(odd) for odd in ("odd", "lake-20260801", LAKE + "x")] == ["odd", "lake-20260801", LAKE + "x"]


def test_names_are_short_where_they_tell_services_apart() -> None:
    assert short_names([LAKE, EXECUTOR]) == {LAKE: "lake", EXECUTOR: "executor"}
    assert short_names([LAKE, OTHER, "odd"]) == {LAKE: "lake ab12", OTHER: "lake ffff", "odd": "odd"}
    assert short_names(iter([LAKE, "lake"])) == {LAKE: "lake ab12", "lake": "lake"}
