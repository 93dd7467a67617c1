from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose import logs
from rose.errors import ClusterError
from rose.logs import REDACTED, RunLog, bound, is_secret, logger, open_log, redact


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[RunLog]:
    with open_log(path) as log:
        yield log


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_json_in_the_file_and_short_on_stderr(
    log: RunLog, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger("engine").warning("restarted", engine_id="engine-0", tokens=3)
    (line,) = lines(path)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "part": "engine", "event": "restarted", "level": "warning", "engine_id": "engine-0", "tokens": 3
    }  # fmt: skip
    assert capsys.readouterr().err.endswith(" warning engine: restarted engine_id=engine-0 tokens=3\n")


def test_bound_ids_are_on_every_line_inside_also_across_tasks_and_of_libraries(log: RunLog, path: Path) -> None:
    async def one(trajectory_id: str) -> None:
        with bound(trajectory_id=trajectory_id, version=7):
            await asyncio.sleep(0)
            logger("rollout").info("turn")
            logging.getLogger("some.library").info("answer of %s", trajectory_id)

    async def both() -> None:
        await asyncio.gather(one("t-1"), one("t-2"))

    asyncio.run(both())
    logger("rollout").info("outside")
    found = lines(path)
    ours = [line for line in found if line["event"] == "turn"]
    theirs = [line for line in found if line["event"].startswith("answer")]
    assert {line["trajectory_id"] for line in ours} == {"t-1", "t-2"}
    assert all(line["event"] == f"answer of {line['trajectory_id']}" and line["version"] == 7 for line in theirs)
    assert theirs[0]["logger"] == "some.library"
    assert "trajectory_id" not in found[-1]


def test_libraries_reach_stderr_only_with_warnings(log: RunLog, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("trouble")
    warnings.warn("old way", stacklevel=1)
    assert {line["level"] for line in lines(path)} == {"info", "warning"}
    said = capsys.readouterr().err
    assert "chatter" not in said
    assert "trouble" in said


def test_stderr_is_told_of_trouble_only(log: RunLog, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger("trainer").info("quiet")
    logger("trainer").error("loud")
    assert [line["event"] for line in lines(path)] == ["quiet", "loud"]
    said = capsys.readouterr().err
    assert "quiet" not in said
    assert "loud" in said


def test_stderr_is_the_one_of_the_moment(log: RunLog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "view").open("w") as replaced:
        monkeypatch.setattr(sys, "stderr", replaced)
        logger("trainer").warning("into the view")
    assert "into the view" in (tmp_path / "view").read_text()


def test_a_traceback_is_in_the_line(log: RunLog, path: Path) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        logger("trainer").exception("failed")
    assert "KeyError: 'lost'" in lines(path)[0]["exception"]


def test_a_full_disk_loses_lines_but_never_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(Path("/dev/full")) as log:
        for _ in range(3):
            logger("trainer").info("lost")
        assert log.lost_lines == 3
    assert capsys.readouterr().err.count("log lines are being lost (No space left on device)") == 1


def test_after_half_a_line_the_next_one_is_whole(log: RunLog, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(logs.os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    logger("trainer").info("torn")
    monkeypatch.setattr(logs.os, "write", real)
    logger("trainer").info("whole")
    logger("trainer").info("next")
    torn, *rest = path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in rest] == ["whole", "next"]
    with pytest.raises(ValueError, match="line 1"):
        json.loads(torn)
    assert log.lost_lines == 1


def test_a_value_that_cannot_be_written_loses_its_line_only(
    log: RunLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [one for one in root.handlers if type(one).__module__ == logs.__name__])

    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no")

        __repr__ = __str__

    logger("trainer").info("rude", value=Rude())
    logger("trainer").info("half a character \ud800")
    assert log.lost_lines == 1
    assert len(lines(path)) == 1


def test_a_closed_terminal_is_no_error(
    log: RunLog, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = (tmp_path / "terminal").open("w")
    gone.close()
    monkeypatch.setattr(sys, "stderr", gone)
    logger("trainer").error("still in the file")
    assert lines(path)[0]["event"] == "still in the file"


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="No such file"):
        open_log(tmp_path / "none" / "log.jsonl")


def test_closed_means_silent_and_a_second_log_appends(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(path) as first:
        logger("a").warning("one")
    first.close()
    logger("a").warning("nowhere")
    with open_log(path):
        logger("a").warning("two")
    assert [line["event"] for line in lines(path)] == ["one", "two"]
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize(
    "key",
    ["token", "lease_token", "accessToken", "api_key", "apiKey", "X-API-Key", "Authorization", "password",
     "client_secret", "HF_TOKEN", "privateKey", "set-cookie", "aws_credentials"],
)  # fmt: skip
def test_keys_of_secrets(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key", ["tokens", "token_ids", "output_tokens", "max_new_tokens", "tokenizer", "key", "keys", "group_id", "", "_"]
)
def test_keys_of_no_secrets(key: str) -> None:
    assert not is_secret(key)


def test_secrets_reach_neither_place(log: RunLog, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    headers = {"Authorization": "Bearer hunter2", "Accept": "text/plain"}
    logger("gateway").warning("request", token="hunter2", headers=headers, tried=[{"password": "hunter2"}])
    assert lines(path)[0]["headers"] == {"Authorization": REDACTED, "Accept": "text/plain"}
    assert "hunter2" not in path.read_text() + capsys.readouterr().err
    assert headers["Authorization"] == "Bearer hunter2"


def test_a_structure_that_holds_itself_is_cut_off(log: RunLog, path: Path) -> None:
    loop: dict[str, object] = {}
    loop["again"] = loop
    logger("trainer").info("loop", loop=loop)
    assert "[too deep]" in path.read_text()


NESTED = st.recursive(
    st.just("open"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "tokens"]), inner, max_size=3),
    max_leaves=4,
)


@settings(derandomize=True)
@given(NESTED, st.sampled_from(["token", "api_key"]))
def test_redaction_finds_a_secret_wherever_it_lies_and_changes_nothing_else(value: object, key: str) -> None:
    assert redact(value) == value
    hidden = redact([value, {"a": {key: "hunter2", "b": value}}])
    assert hidden == [value, {"a": {key: REDACTED, "b": value}}]
