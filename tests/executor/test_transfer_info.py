"""What is told to the weight transfer backend is refused in words where it is of another kind, before it is used."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

INIT = {"address": "127.0.0.1:7070", "token_file": "token", "folder": "w"}
NO_VERSION = ["7", "../x", 7.0, math.nan, True, None, -1, 2**63, 10**30, [7], {}]
NO_TIME = ["5", None, True, 0, -1, math.nan, math.inf, 10**400, [5]]
NO_TEXT = [5, None, True, ["w"], {}]
NO_PATH = ["", "a\0b"]
SOUND: list[tuple[str, dict[str, Any]]] = [
    ("update", {"version": 0}),
    ("update", {"version": 2**63 - 1, "timeout_s": 5}),
    ("update", {"version": 7, "timeout_s": 0.5}),
    ("init", INIT),
    ("init", {**INIT, "certificates": "certificates"}),
    ("init", {**INIT, "certificates": None}),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(("update", {"version": value}, f"transfer: {value!r} is no number of a version") for value in NO_VERSION),
    *(
        ("update", {"version": 7, "timeout_s": value}, f"transfer: timeout_s={value!r} is no time to fetch in")
        for value in NO_TIME
    ),
    *(("init", {**INIT, "address": value}, f"config: address={value!r} is no address") for value in NO_TEXT),
    *(
        ("init", {**INIT, name: value}, f"config: {name}={value!r} is no path")
        for name in ("token_file", "folder", "certificates")
        for value in NO_TEXT + NO_PATH
        if (name, value) != ("certificates", None)
    ),
]
ASK = """
import json, sys
from rose.errors import RoseError
from rose_executor.transfer_info import RoseInitInfo, RoseUpdateInfo

said = []
for kind, info in json.load(sys.stdin):
    try:
        {"init": RoseInitInfo, "update": RoseUpdateInfo}[kind](**info)
        said.append("")
    except RoseError as error:
        said.append(str(error))
print("\\n" + json.dumps(said))
"""


def test_what_is_of_another_kind_is_refused_and_nothing_else() -> None:
    """In a process of its own, for it imports vLLM."""
    asked = [[kind, info] for kind, info, *_ in (*SOUND, *WRONG)]
    ended = subprocess.run(
        [sys.executable, "-c", ASK], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said[: len(SOUND)] == [""] * len(SOUND)
    for words, (_, info, expected) in zip(said[len(SOUND) :], WRONG, strict=True):
        assert words.startswith(f"{expected}; expected "), info
