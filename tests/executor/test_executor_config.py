"""What an executor is started with: both files, flags before keys, and every problem at once."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from rose.cli.app_executor import HELP
from rose.errors import ConfigError
from rose.slo import Slo
from rose_executor.executor_config import ExecutorConfig, JoinConfig, load_executor_config

ROOT = Path(__file__).parents[2]
FILE = """
[executor]
state = "state"
cores = [0, 1]

[serving]
board = "/dev/shm/board"
ttft_ms = 500
tpot_ms = 62.5

[guest]
model = "../model"
"""
JOIN = """
[join]
scheduler = "127.0.0.1:7080"
weights = "[::1]:7070"
token_file = "token"
"""


def files(folder: Path, text: str = FILE, join: str = JOIN) -> tuple[Path, Path]:
    (folder / "run").mkdir()
    config, lend = folder / "executor.toml", folder / "run" / "lend.toml"
    config.write_text(text)
    lend.write_text(join)
    return config, lend


def test_two_files_make_a_whole(tmp_path: Path) -> None:
    config = load_executor_config(*files(tmp_path), {})
    assert config.executor.state == tmp_path / "state"
    assert config.executor.cores == [0, 1]
    assert config.executor.name == "executor"
    assert config.join.token_file == tmp_path / "run" / "token"
    assert config.join.weights == "[::1]:7070"
    assert config.serving.board == Path("/dev/shm/board")
    assert config.serving.slo == Slo(0.5, 0.0625)
    assert config.guest.model.resolve() == (tmp_path / "../model").resolve()
    assert config.guest.start_timeout_s == 600.0


def test_a_join_file_takes_the_place_of_the_section_and_flags_come_before_keys(tmp_path: Path) -> None:
    file, join = files(tmp_path, FILE + JOIN.replace("7080", "1"))
    assert load_executor_config(file, None, {}).join.scheduler == "127.0.0.1:1"
    config = load_executor_config(file, join, {"name": "second", "state": Path("other"), "port": None})
    assert config.join.scheduler == "127.0.0.1:7080"
    assert (config.executor.name, config.executor.state, config.executor.port) == ("second", Path("other"), 0)


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    text = FILE.replace("cores = [0, 1]", 'cores = ["one"]\nport = -1').replace(
        "ttft_ms = 500", "ttft_ms = 0\ntftp = 1"
    )
    file, join = files(tmp_path, text, JOIN.replace("127.0.0.1:7080", "nowhere"))
    with pytest.raises(ConfigError) as refused:
        load_executor_config(file, join, {"name": "A B"})
    first, *others = str(refused.value).splitlines()
    assert first.endswith(f"{file}, with [join] of {join}:")
    assert others == [
        '  executor.name = "A B": allowed is text that matches `^[a-z0-9][a-z0-9-]{0,23}$`',
        "  executor.port = -1: allowed is a whole number from 0 to 65535",
        '  executor.cores.0 = "one": allowed is a list of whole numbers',
        '  join.scheduler = "nowhere": allowed is HOST:PORT, such as 10.0.0.7:7070',
        "  serving.ttft_ms = 0: allowed is a number above 0 to 3600000",
        "  serving.tftp: unknown key; allowed are board, metrics, ttft_ms, tpot_ms; mend them;"
        " `rose executor --help` shows every key",
    ]


@pytest.mark.parametrize("value", ["5", "nan", '"a\\u0000b"', "[]"])
def test_a_folder_of_profiles_that_is_none_is_named(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"executor\.profiles = .*: allowed is text"):
        load_executor_config(*files(tmp_path, FILE.replace("cores = [0, 1]", f"profiles = {value}")), {})


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "sched..example:7080", "host:0", "", "http://host:80"])
@pytest.mark.parametrize("key", ["scheduler", "weights"])
def test_an_address_that_nobody_can_dial_is_found_at_the_start(tmp_path: Path, key: str, address: str) -> None:
    sound = {"scheduler": "127.0.0.1:7080", "weights": "[::1]:7070"}[key]
    with pytest.raises(ConfigError, match=rf'join\.{key} = ".*": allowed is HOST:PORT, such as'):
        load_executor_config(*files(tmp_path, join=JOIN.replace(sound, address)), {})


def test_nothing_but_a_run_to_join_belongs_into_a_join_file(tmp_path: Path) -> None:
    file, join = files(tmp_path, join=JOIN + "[executor]\nname = 'x'\n")
    with pytest.raises(ConfigError, match=r"sections \['executor', 'join'\]"):
        load_executor_config(file, join, {})


@pytest.mark.parametrize("missing", ["executor.toml", "run/lend.toml"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, missing: str) -> None:
    file, join = files(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        load_executor_config(file, join, {})


def test_without_any_file_the_sections_are_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=r"the flags:\n  executor.state: missing(.|\n)*join: missing(.|\n)*guest: missing"
    ):
        load_executor_config(None, None, {"name": "x"})


def test_the_example_of_the_documents_is_one(tmp_path: Path) -> None:
    document = (ROOT / "executor/README.md").read_text("utf-8")
    (join,) = re.findall(r"```toml\n(\[join\].*?)```", document, re.DOTALL)
    (example,) = re.findall(r"```toml\n(\[executor\].*?)```", document, re.DOTALL)
    config = load_executor_config(*files(tmp_path, example, join), {})
    assert config.join.model_fields_set == set(JoinConfig.model_fields)
    assert config.join.token_file == tmp_path / "run" / "token"
    assert (config.executor.cores, config.guest.max_num_seqs) == ([0], 64)
    memory = config.memory  # in every tier the guest has its whole cache when serving has nothing to do
    least_gib = (memory.serving_gib + config.guest.kv_cache_gib) / (1 - memory.headroom)
    assert memory.pool_gib >= least_gib


def test_the_help_shows_every_key_with_its_default(tmp_path: Path) -> None:
    text = inspect.cleandoc(HELP)
    (shown,) = re.findall(r"(  \[executor\].*?)\n\n", text, re.DOTALL)
    file = tmp_path / "executor.toml"
    file.write_text(inspect.cleandoc(shown))
    config = load_executor_config(file, None, {})
    asked_for = {"state", "scheduler", "weights", "token_file", "board", "ttft_ms", "tpot_ms", "model"}
    for name, field in ExecutorConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        keys = field.annotation.model_fields
        assert set(getattr(config, name).model_fields_set) == set(keys)
        for key, found in keys.items():
            assert found.is_required() == (key in asked_for)
            if key == "out":
                assert getattr(config, name).out == tmp_path / found.default
            elif not found.is_required():
                assert getattr(getattr(config, name), key) == found.default


def test_ports_are_apart(tmp_path: Path) -> None:
    file, join = files(tmp_path, FILE + "port = 7000\n")
    with pytest.raises(ConfigError, match=r"guest.port = 7000: allowed is any port but executor.metrics_port"):
        load_executor_config(file, join, {"metrics_port": 7000})


def test_a_pool_of_memory_needs_to_know_how_large_servings_part_can_be(tmp_path: Path) -> None:
    file, join = files(tmp_path, FILE + "[memory]\npool_gib = 2\n")
    with pytest.raises(ConfigError, match=r"memory.serving_gib = 0: beside memory.pool_gib it must"):
        load_executor_config(file, join, {})
    file.write_text(FILE + "[memory]\npool_gib = 2\nserving_gib = 1.5\n")
    assert load_executor_config(file, join, {}).memory.headroom == 0.2


@pytest.mark.parametrize(
    "page",
    [
        *("https://host/metrics", "host:8000/metrics", "http://user@host/metrics", "http://"),
        *("http://127.0.0.1:99999/metrics", "http://a..b:8000/metrics"),
    ],
)
def test_a_page_that_cannot_be_scraped_is_refused(tmp_path: Path, page: str) -> None:
    file, join = files(tmp_path, FILE.replace("ttft_ms = 500", f'ttft_ms = 500\nmetrics = "{page}"'))
    with pytest.raises(ConfigError, match=r"serving\.metrics = "):
        load_executor_config(file, join, {})


@pytest.mark.parametrize("page", ["http://127.0.0.1:8000/metrics", "http://[::1]:8000/metrics", ""])
def test_the_page_of_a_stock_serving_engine_may_be_named(tmp_path: Path, page: str) -> None:
    file, join = files(tmp_path, FILE.replace("ttft_ms = 500", f'ttft_ms = 500\nmetrics = "{page}"'))
    assert load_executor_config(file, join, {}).serving.metrics == page


def test_memory_that_stays_free_is_looked_after_in_a_pool_alone(tmp_path: Path) -> None:
    file, join = files(tmp_path, FILE + "[memory]\nkeep_free_gib = 2\n")
    with pytest.raises(ConfigError, match=r"memory.pool_gib = 0: beside memory.keep_free_gib it must"):
        load_executor_config(file, join, {})
    file.write_text(FILE + "[memory]\npool_gib = 2\nserving_gib = 1.5\nkeep_free_gib = 2\n")
    assert load_executor_config(file, join, {}).memory.keep_free_gib == 2
