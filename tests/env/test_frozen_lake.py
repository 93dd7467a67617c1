from __future__ import annotations

import pytest

from rose.env.frozen_lake import FrozenLake


def at_start(**params: object) -> FrozenLake:
    lake = FrozenLake(frozen=1.0, **params)  # type: ignore[arg-type]
    lake.reset(1, "a")
    return lake


def test_the_observation_is_the_map_and_the_neighbours() -> None:
    lake = FrozenLake()
    assert lake.reset(3, "a") == " P _ O _\n _ _ _ _\n _ _ _ _\n _ _ _ G\n left # down _ right _ up #"
    assert lake.grid == ("SFHF", "FFFF", "FFFF", "FFFG")


def test_the_seed_decides_the_map() -> None:
    maps = {FrozenLake().reset(seed, "a") for seed in range(50)}
    assert len(maps) > 30
    assert FrozenLake().reset(9, "a") == FrozenLake().reset(9, "b")


def test_reaching_the_goal_rewards_once_and_ends() -> None:
    lake = at_start()
    way = [lake.step(f"<action>{move}</action>") for move in ("right", "right", "right", "down", "down", "down")]
    assert [result.reward for result in way] == [0, 0, 0, 0, 0, 1]
    assert [result.over for result in way] == [False] * 5 + [True]
    assert way[-1].success
    assert way[-1].terminated
    assert not way[-1].truncated


def test_a_hole_ends_without_reward() -> None:
    lake = FrozenLake()
    lake.reset(3, "a")
    lake.step("<action>right</action>")
    result = lake.step("<action>right</action>")
    assert (result.reward, result.terminated, result.success) == (0.0, True, False)


@pytest.mark.parametrize(
    "action",
    [
        "",
        "right",
        "<action>right",
        "<action> right</action>",
        "<action>right</action>\n",
        "<action>north</action>",
        "<action>right</action><action>right</action>",
    ],
)
def test_a_malformed_action_moves_nobody_and_costs(action: str) -> None:
    lake = at_start(malformed_penalty=0.25)
    result = lake.step(action)
    assert lake.position == (0, 0)
    assert result.malformed
    assert result.reward == -0.25
    assert result.observation.startswith(" invalid\n P _")


@pytest.mark.parametrize("action", ["<action>left</action>", "nonsense"])
def test_the_limit_of_turns_truncates(action: str) -> None:
    lake = at_start(max_turns=3)
    results = [lake.step(action) for _ in range(3)]
    assert [result.truncated for result in results] == [False, False, True]
    assert not results[-1].terminated


def test_reaching_the_goal_on_the_last_turn_terminates() -> None:
    lake = FrozenLake(size=2, frozen=1.0, max_turns=2)
    lake.reset(1, "a")
    lake.step("<action>right</action>")
    result = lake.step("<action>down</action>")
    assert (result.terminated, result.truncated, result.success) == (True, False, True)


def test_slipping_differs_by_episode_and_replays_exactly() -> None:
    def walk(episode_id: str) -> list[str]:
        lake = FrozenLake(size=8, frozen=1.0, slippery=True)
        lake.reset(4, episode_id)
        return [lake.step("<action>right</action>").observation for _ in range(8)]

    assert walk("a") == walk("a")
    assert len({tuple(walk(name)) for name in "abcdef"}) > 1


def test_stepping_before_reset_or_after_close_raises() -> None:
    lake = FrozenLake()
    with pytest.raises(RuntimeError):
        lake.step("<action>right</action>")
    lake.reset(1, "a")
    lake.close()
    lake.close()
    with pytest.raises(RuntimeError):
        lake.step("<action>right</action>")
