"""Deadlines come out in order, once, and leave nothing behind."""

from __future__ import annotations

from random import Random

from rose_scheduler.deadlines import Deadlines


def test_the_earliest_come_first_and_only_those_that_stand() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for name, due_s in (("b", 2.0), ("a", 1.0), ("late", 9.0), ("dropped", 0.5), ("c", 2.0), ("moved", 1.5)):
        deadlines.set(name, due_s)
    deadlines.drop("dropped")
    deadlines.drop("never")
    deadlines.set("moved", 3.0)
    assert deadlines.next_s() == 1.0
    assert list(deadlines.overdue(2.0)) == ["a", "b", "c"]
    assert list(deadlines.overdue(2.0)) == []
    assert list(deadlines.overdue(3.0)) == ["moved"]
    assert (len(deadlines), deadlines.next_s()) == (1, 9.0)


def test_what_is_set_or_dropped_while_they_come_out_counts() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("b", 2.0)
    seen = []
    for name in deadlines.overdue(5.0):
        seen.append(name)
        if name == "a":
            deadlines.drop("b")
            deadlines.set("c", 4.0)
    assert seen == ["a", "c"]
    assert deadlines.next_s() is None


def test_they_agree_with_a_table_and_what_is_dropped_takes_no_memory() -> None:
    random, deadlines, table = Random(7), Deadlines[int](), dict[int, float]()
    now = 0.0
    for _ in range(20_000):
        name = random.randrange(50)
        if random.random() < 0.8:
            table[name] = now + random.random() * 1000
            deadlines.set(name, table[name])
        else:
            table.pop(name, None)
            deadlines.drop(name)
        now += random.choice((0.0, 0.5))
        due = sorted((due_s, name) for name, due_s in table.items() if due_s <= now)
        assert list(deadlines.overdue(now)) == [name for _, name in due]
        for _, name in due:
            del table[name]
        assert len(deadlines) == len(table)
        assert deadlines.kept <= 2 * 50 + 65
