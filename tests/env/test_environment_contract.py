from __future__ import annotations

import pytest

from rose.env.contract import Environment, load_environment
from rose.env.frozen_lake import FrozenLake
from rose.errors import ConfigError


def test_a_built_in_name_and_a_class_path_load_the_same_class() -> None:
    for kind in ("frozen_lake", "rose.env.frozen_lake:FrozenLake"):
        made = load_environment(kind, {"size": 5})()
        assert isinstance(made, FrozenLake)
        assert isinstance(made, Environment)


def test_every_episode_gets_an_environment_of_its_own() -> None:
    make = load_environment("frozen_lake", {})
    assert make() is not make()


@pytest.mark.parametrize(
    ("kind", "params", "named"),
    [
        ("frozen_lak", {}, "one of frozen_lake"),
        ("no.such.module:Class", {}, "cannot import no.such.module"),
        ("no_such_module:Class", {}, "put its folder on PYTHONPATH"),
        ("rose.env.frozen_lake:Frozen", {}, "one of FrozenLake"),
        ("rose.env.frozen_lake:MOVES", {}, "has no class 'MOVES'"),
        ("collections:OrderedDict", {}, "lacks system_prompt, reset, step, close"),
        ("frozen_lake", {"sise": 4}, "size, frozen, max_turns, slippery, malformed_penalty"),
        ("frozen_lake", {"size": 1}, "allowed are 2 to 16"),
        ("frozen_lake", {"size": "4"}, "refuses its parameters"),
    ],
)
def test_a_wrong_kind_or_parameter_says_what_there_is(kind: str, params: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment(kind, params)
    assert named in str(caught.value)
