"""Transcripts of FrozenLake episodes played by a teacher that is good, bad, or now and then malformed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rose.env.frozen_lake import MOVES, FrozenLake

# Acting by these weights alone reaches the goal of about a third of all maps: it lies down and to the right.
_BIASED_WEIGHTS = {"left": 1, "down": 2, "right": 2, "up": 1}


@dataclass(frozen=True, slots=True)
class Transcript:
    """Observations and answers by turns; the observation after the last answer is the last one."""

    system_prompt: str
    observations: tuple[str, ...]
    answers: tuple[str, ...]
    success: bool


@dataclass(frozen=True, slots=True)
class Teacher:
    """Goes a shortest way with probability `skill`, else moves at random with a bias to the lower right.

    `malformed` is the share of answers whose closing tag is missing.
    """

    skill: float
    malformed: float = 0.02

    def act(self, lake: FrozenLake, draw: random.Random) -> str:
        if draw.random() < self.skill:
            move = draw.choice(shortest_moves(lake.grid, lake.position))
        else:
            move = draw.choices(list(_BIASED_WEIGHTS), list(_BIASED_WEIGHTS.values()))[0]
        return f"<action>{move}" if draw.random() < self.malformed else f"<action>{move}</action>"


def shortest_moves(grid: tuple[str, ...], at: tuple[int, int]) -> list[str]:
    """All first moves of shortest ways from `at` to the lower right corner, around holes."""
    distance = _distances(grid)
    reached = {
        name: distance[cell]
        for name, (down, right) in MOVES.items()
        if (cell := (at[0] + down, at[1] + right)) in distance
    }
    nearest = min(reached.values())
    return [name for name, steps in reached.items() if steps == nearest]


def _distances(grid: tuple[str, ...]) -> dict[tuple[int, int], int]:
    last = len(grid) - 1
    distance = {(last, last): 0}
    frontier = deque(distance)
    while frontier:
        row, column = frontier.popleft()
        for down, right in MOVES.values():
            cell = (row + down, column + right)
            inside = 0 <= cell[0] <= last and 0 <= cell[1] <= last
            if inside and cell not in distance and grid[cell[0]][cell[1]] != "H":
                distance[cell] = distance[row, column] + 1
                frontier.append(cell)
    return distance


def play(teacher: Teacher, seeds: range, draw: random.Random) -> Iterator[Transcript]:
    """One transcript per map seed."""
    for seed in seeds:
        lake = FrozenLake()
        observations = [lake.reset(seed, "teacher")]
        answers: list[str] = []
        success = over = False
        while not over:
            answers.append(teacher.act(lake, draw))
            result = lake.step(answers[-1])
            observations.append(result.observation)
            success, over = result.success, result.over
        yield Transcript(lake.system_prompt, tuple(observations), tuple(answers), success)
