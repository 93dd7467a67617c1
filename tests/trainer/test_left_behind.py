"""Who is told that nobody will ask for a prefix again."""

from __future__ import annotations

from rose.trainer.left_behind import INCARNATIONS_MAX, NAMES_MAX, LeftBehind


def test_an_engine_hears_once_of_what_is_over_there() -> None:
    left = LeftBehind()
    assert left.on("e1", "a") == left.on("e1", "b") == left.on("e2", "c") == ()
    left.over("a")
    left.over("c")
    assert left.on("e1", "b") == ("a",)
    assert left.on("e1", "b") == ()
    assert left.on("e2", "") == ("c",)


def test_who_moves_leaves_a_prefix_behind_and_takes_it_up_when_it_comes_back() -> None:
    left = LeftBehind()
    left.on("e1", "a")
    left.on("e2", "a")
    left.on("e2", "b")
    assert left.on("e1", "a") == ()
    left.over("b")
    assert left.on("e2", "c") == ("a", "b")


def test_what_was_never_kept_is_told_to_nobody() -> None:
    left = LeftBehind()
    left.over("a")
    assert left.on("e1", "") == ()
    left.over("")
    assert left.on("e1", "") == ()


def test_it_is_bounded() -> None:
    left = LeftBehind()
    for number in range(2 * NAMES_MAX):
        left.on("e1", str(number))
        left.over(str(number))
        assert len(left._to_forget.get("e1", ())) <= 1
        left.on("e2", str(number))
        left.over(str(number))
    for number in range(2 * NAMES_MAX):
        left.on("e", f"x{number}")
    for number in range(2 * NAMES_MAX):
        left.over(f"x{number}")
    assert len(left.on("e", "")) == NAMES_MAX
    for number in range(2 * INCARNATIONS_MAX):
        left.on(f"i{number}", "y")
        left.over("y")
    assert len(left._to_forget) == INCARNATIONS_MAX
    assert not left._kept_on
