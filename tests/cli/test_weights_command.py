"""`rose weights` on real stores, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.cli.weights import figure, size
from rose_transfer.layout.layout import Parameter
from rose_transfer.store import Store, StoreReader
from rose_transfer.store.packing import pack_whole
from rose_transfer.store.survey import verify

PACKING = pack_whole({"embed": Parameter((40, 8), "bfloat16"), "norm\x1b[2J": Parameter((8,), "float32")})


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Versions 1 to 3: from 1 to 2 five elements of the embedding change, from 2 to 3 one of the norm as well."""
    rng = np.random.default_rng(5)
    bits = [
        rng.integers(0, 2**15, bucket.elements, dtype=np.dtype(f"<u{bucket.lane}").type) for bucket in PACKING.buckets
    ]
    store = Store(tmp_path / "store")
    store.publish(1, PACKING, bits)
    embed, norm = 0, 1
    bits[embed][10:15] += 1
    store.publish(2, PACKING, bits, base=1)
    bits[embed][20] += 1
    bits[norm][3] += 1
    store.publish(3, PACKING, bits, base=2)
    store.close()
    return tmp_path / "store"


def spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_versions_are_listed_with_what_leads_to_them(rose: Any, folder: Path) -> None:
    ended = rose("weights", "ls", folder)
    assert ended.status == 0
    head, *rows = words(ended.out)
    assert head == "version fingerprint ways to it who joins fetches dense smallest step"
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert "whole" in rows[0]
    assert "from 1" in rows[1]
    assert "times smaller" in rows[1]


def test_the_list_for_programs_has_whole_fingerprints(rose: Any, folder: Path) -> None:
    rows = json.loads(rose("weights", "ls", folder, "--json").out)
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert {len(row["fingerprint"]) for row in rows} == {64}
    assert [[way["base"] for way in row["ways"]] for row in rows] == [[None], [1], [2]]
    assert {row["dense_bytes"] for row in rows} == {PACKING.dense_bytes}
    fetched = [row["joiner_bytes"] for row in rows]
    assert fetched == sorted(fetched)


def test_the_folder_of_a_relay_stands_for_its_store(rose: Any, folder: Path) -> None:
    assert (folder.parent / "store").samefile(folder)
    assert rose("weights", "ls", folder.parent).out == rose("weights", "ls", folder).out
    assert f"in {folder}" in " ".join(rose("weights", "verify", folder.parent).out.split())
    assert rose("weights", "diff", folder.parent, 1, 2).status == 0
    (folder.parent / "empty").mkdir()
    assert rose("weights", "ls", folder.parent / "empty").status != 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1064.2, "1,060"),
        (1_234_567, "1,230,000"),
        (999.6, "1,000"),
        (100, "100"),
        (12.34, "12.3"),
        (12.0, "12"),
        (0.5, "0.5"),
        (0.000012345, "0.0000123"),
    ],
)
def test_counts_are_written_as_people_do(value: float, text: str) -> None:
    assert figure(value) == text


def test_an_empty_store_is_no_error(rose: Any, tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    assert rose("weights", "ls", tmp_path / "store").out == "no versions yet\n"
    ended = rose("weights", "verify", tmp_path / "store")
    assert (ended.status, "all whole: 0 versions" in ended.out) == (0, True)


def test_a_whole_store_is_verified_with_status_0(rose: Any, folder: Path) -> None:
    ended = rose("weights", "verify", folder)
    assert ended.status == 0
    assert ended.out.startswith("all whole: 3 versions, ")
    assert json.loads(rose("weights", "verify", folder, "--json").out) == {"versions": [1, 2, 3], "problems": []}


@pytest.mark.parametrize("kind", ["object", "link", "mark"])
def test_whatever_is_damaged_is_told_with_status_1(rose: Any, folder: Path, kind: str) -> None:
    deltas = [file for file in (folder / "objects").iterdir() if file.read_bytes()[:4] == b"RDLT"]
    damaged = {
        "object": min(deltas),
        "link": folder / "links" / "v000003-from-v000002",
        "mark": folder / "versions" / "v000003",
    }
    spoil(damaged[kind])
    ended = rose("weights", "verify", folder)
    assert ended.status == 1
    assert "problems: " in words(ended.out)[-1]
    told = json.loads(rose("weights", "verify", folder, "--json").out)["problems"]
    assert len(told) >= 1
    assert told[0] in ended.out.splitlines()


@pytest.mark.parametrize("kept", [1, 2])
def test_what_a_trainer_removes_meanwhile_is_no_damage(folder: Path, kept: int) -> None:
    reader = StoreReader(folder)
    store = Store(folder)
    bits = [bucket + 1 for bucket in store.read(3)]
    store.publish(4, PACKING, bits, base=3)
    store.collect(kept)
    assert verify(reader) == ()
    spoil(min(path for path in (folder / "objects").iterdir() if path.read_bytes()[:4] == b"RDLT"))
    assert verify(StoreReader(folder)) != ()
    store.close()


def test_a_version_that_cannot_be_had_is_listed_as_lost(rose: Any, folder: Path) -> None:
    (folder / "links" / "v000001-whole").unlink()
    assert all("lost" in row for row in words(rose("weights", "ls", folder).out)[1:])
    assert {row["joiner_bytes"] for row in json.loads(rose("weights", "ls", folder, "--json").out)} == {None}


def test_a_version_that_only_a_newer_one_leads_back_to_says_so(rose: Any, folder: Path) -> None:
    store = Store(folder)
    rng = np.random.default_rng(6)
    bits = [rng.integers(0, 2**15, len(bucket), dtype=bucket.dtype.type) for bucket in store.read(3)]
    store.publish(4, PACKING, bits, base=3)
    store.collect(4)  # all of it has changed, so it is written whole as well
    store.close()
    (folder / "links" / "v000003-from-v000002").unlink()
    rows = json.loads(rose("weights", "ls", folder, "--json").out)
    assert [[way["base"] for way in row["ways"]] for row in rows] == [[None], [1], [], [None, 3]]
    (undone,) = (way["encoded_bytes"] for way in rows[3]["ways"] if way["base"] == 3)
    listed = words(rose("weights", "ls", folder).out)
    assert f"{undone} B back from 4" in listed[3]
    assert not any("back from" in row for row in (*listed[:3], listed[4]))


def test_versions_of_which_nothing_is_left_are_lost(rose: Any, folder: Path) -> None:
    for path in (folder / "objects").iterdir():
        path.write_bytes(b"")
    listed = rose("weights", "ls", folder).out
    assert listed.count("lost") == 2 * 3
    assert "back from" not in listed


def test_what_the_library_says_is_a_plain_line_each_and_once(folder: Path) -> None:
    os.mkfifo(folder / "versions" / "pi\npe\x1b[2J")
    (folder / "versions" / "v000003").write_bytes(b"")
    for arguments in (("ls",), ("verify",), ("diff", "1", "2")):
        told = subprocess.run(
            [sys.executable, "-m", "rose.cli.main", "weights", arguments[0], folder, *arguments[1:]],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
        assert sorted(line.partition("=")[0] for line in told.stderr.splitlines()) == [
            "weight store: a file of the store counts as not there file",
            "weight store: what is no file is passed over what",
        ]
        assert "\x1b" not in told.stderr


def test_changes_are_counted_by_parameter_most_first(rose: Any, folder: Path) -> None:
    ended = rose("weights", "diff", folder, 1, 3)
    assert ended.status == 0
    assert words(ended.out) == [
        "changed of parameter",
        "6 320 1.88 % embed",
        "1 8 12.5 % norm [2J",
        "7 328 2.13 % all together",
        "2 of 2 parameters changed",
    ]
    assert "\x1b" not in ended.out
    assert "1 of 2 parameters changed" in rose("weights", "diff", folder, 2, 1).out


def test_a_limit_says_how_many_it_left_out_and_0_shows_all(rose: Any, folder: Path) -> None:
    ended = rose("weights", "diff", folder, 1, 3, "--limit", 1)
    assert words(ended.out)[1:] == [
        "6 320 1.88 % embed",
        "7 328 2.13 % all together",
        "2 of 2 parameters changed, 1 not shown",
    ]
    assert rose("weights", "diff", folder, 1, 3, "--limit", 0).out == rose("weights", "diff", folder, 1, 3).out
    changes = json.loads(rose("weights", "diff", folder, 1, 3, "--limit", 1, "--json").out)
    assert changes == [{"parameter": "embed", "elements": 320, "changed": 6}]


@pytest.mark.parametrize("value", ["-1", "1e3", "nan", str(2**63), "9" * 5000])
def test_a_number_that_is_none_is_a_usage_error(rose: Any, folder: Path, value: str) -> None:
    for args, name in ((("--", value, 2), "OLD"), (("--", 1, value), "NEW"), ((1, 2, f"--limit={value}"), "--limit")):
        ended = rose("weights", "diff", folder, *args)
        assert ended.status == 2
        assert f"Invalid value for '{name}'" in ended.err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("diff", "store", 1, 9), "one that is kept: 1, 2, 3"),
        (("ls", "nowhere"), "a folder that a store was opened in"),
        (("verify", "nowhere"), "a folder that a store was opened in"),
    ],
)
def test_what_is_not_there_is_an_error_in_plain_words(
    rose: Any, folder: Path, args: tuple[object, ...], expected: str
) -> None:
    ended = rose("weights", *args)
    assert ended.status == 1
    assert f"expected: {expected}" in ended.err


def test_the_group_and_its_commands_explain_themselves(rose: Any) -> None:
    assert "weights" in rose("--help").out
    assert "rose weights diff" in rose("weights", "--help").out
    for command in ("ls", "verify", "diff"):
        ended = rose("weights", command, "-h")
        assert (ended.status, f"Usage: rose weights {command}" in ended.out) == (0, True)


def test_looking_into_a_store_imports_no_framework(folder: Path) -> None:
    code = f"""
import sys
from rose.cli.main import main

sys.argv = ["rose", "weights", "verify", {str(folder)!r}]
try:
    main()
except SystemExit:
    pass
print(sorted({{"torch", "vllm", "transformers"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12_345, "12.1 KiB"),
        (1_023_900, "1000 KiB"),
        (3 * 2**30 // 2, "1.50 GiB"),
        (2**50, "1024 TiB"),
        (2**20, "1.00 MiB"),
    ],
)
def test_sizes_are_short(count: int, text: str) -> None:
    assert size(count) == text
