"""FrozenLake as a text task of several turns, on gymnasium's rules.

The player `P` walks a square lake from the upper left corner to the goal `G` around holes `O`. An observation
is the map and the four neighbouring cells:

     P _ O _
     _ _ _ _
     _ O _ _
     _ _ _ G
     left # down _ right _ up #

An action is exactly `<action>left</action>` (or down, right, up). Anything else is malformed: it moves nobody,
costs a turn and `malformed_penalty`. Reaching the goal rewards 1; a hole ends the episode with 0.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from rose.env.contract import StepResult

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Row and column step of each action, in gymnasium's order of action numbers."""

SYSTEM_PROMPT = "P is you. Reach G, avoid O. Reply <action>left, down, right or up</action>."
_ACTION = re.compile(rf"<action>({'|'.join(MOVES)})</action>")
_GLYPHS = {"S": "_", "F": "_", "H": "O", "G": "G"}


class FrozenLake:
    """One episode on a random map that the seed decides; every map has a way to the goal.

    `frozen` is the share of cells that carry the player, `slippery` lets two moves of three go astray.
    Raises ValueError if a parameter is out of range.
    """

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        max_turns: int = 10,
        slippery: bool = False,
        malformed_penalty: float = 0.1,
    ) -> None:
        if not 2 <= size <= 16:
            raise ValueError(f"size is {size}, allowed are 2 to 16")
        if not 0.5 <= frozen <= 1.0:
            raise ValueError(f"frozen is {frozen}, allowed are 0.5 to 1")
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, allowed are 1 and more")
        self._size, self._frozen, self._slippery = size, frozen, slippery
        self._turns_left = max_turns
        self._malformed_penalty = malformed_penalty
        self._grid: tuple[str, ...] = ()
        self._at = 0
        self._lake: FrozenLakeEnv | None = None

    @property
    def system_prompt(self) -> str:
        return SYSTEM_PROMPT

    @property
    def grid(self) -> tuple[str, ...]:
        """Rows of the map in gymnasium's letters (S, F, H, G), empty before `reset`."""
        return self._grid

    @property
    def position(self) -> tuple[int, int]:
        """Row and column of the player."""
        return divmod(self._at, self._size)

    def reset(self, seed: int, episode_id: str) -> str:
        self._grid = _random_map(self._size, self._frozen, seed)
        self._lake = FrozenLakeEnv(desc=list(self._grid), is_slippery=self._slippery)
        # Attempts at one map must slip differently, or a group would be one attempt repeated.
        at, _ = self._lake.reset(seed=zlib.crc32(f"{seed}/{episode_id}".encode()))
        self._at = int(at)
        return self._observe()

    def step(self, action: str) -> StepResult:
        if self._lake is None:
            raise RuntimeError("step before reset, or after close")
        self._turns_left -= 1
        read = _ACTION.fullmatch(action)
        if read is None:
            over = self._turns_left <= 0
            return StepResult(
                f" invalid\n{self._observe()}", -self._malformed_penalty, False, truncated=over, malformed=True
            )
        at, reward, terminated, _, _ = self._lake.step(list(MOVES).index(read[1]))
        self._at = int(at)
        return StepResult(
            self._observe(),
            float(reward),
            bool(terminated),
            truncated=self._turns_left <= 0 and not terminated,
            success=self._cell(*self.position) == "G",
        )

    def close(self) -> None:
        self._lake = None

    def _cell(self, row: int, column: int) -> str:
        inside = 0 <= row < self._size and 0 <= column < self._size
        return _GLYPHS[self._grid[row][column]] if inside else "#"

    def _observe(self) -> str:
        player = self.position
        lines = [
            "".join(" P" if (row, column) == player else f" {self._cell(row, column)}" for column in range(self._size))
            for row in range(self._size)
        ]
        lines.append(
            "".join(
                f" {name} {self._cell(player[0] + down, player[1] + right)}" for name, (down, right) in MOVES.items()
            )
        )
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def _random_map(size: int, frozen: float, seed: int) -> tuple[str, ...]:
    # Kept because all attempts of a group share their map, and drawing one costs more than a whole episode.
    return tuple(generate_random_map(size=size, p=frozen, seed=seed))
