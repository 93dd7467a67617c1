"""Every format is written as its source publishes it and read back; every way to be wrong is named by its line."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trace_writers as writers
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.workload import trace_files
from rose.workload.shipped_traces import ATTRIBUTIONS, FOLDER, named_trace, shipped_trace
from rose.workload.trace import Trace, TraceRequest
from rose.workload.trace_files import LINE_BYTES_MAX, read_trace

Writer = Callable[[Sequence[TraceRequest]], str]
WRITERS: list[tuple[Writer, int]] = [
    (writers.own, 512),
    (writers.azure_2023, 0),
    (writers.azure_2024, 0),
    (writers.burstgpt, 0),
    (writers.burstgpt_sessions, 0),
    (writers.mooncake, 512),
    (writers.bailian, 16),
]
REQUESTS = st.lists(
    st.builds(
        lambda ms, prompt, output, blocks: TraceRequest(ms / 1000, prompt, output, tuple(blocks)),
        st.integers(0, 10**8),
        st.integers(1, 200_000),
        st.integers(1, 20_000),
        st.lists(st.integers(0, 2**40), max_size=4),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.mark.parametrize(("writer", "block_tokens"), WRITERS, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@settings(max_examples=30)
@given(requests=REQUESTS)
def test_what_is_written_is_read_back(
    folder: Path, writer: Writer, block_tokens: int, packed: bool, requests: list[TraceRequest]
) -> None:
    # A name that says nothing: the content alone decides.
    path = folder / f"{writer.__name__}-{packed}"
    text = writer(requests).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    trace = read_trace(path)
    first_s = min(one.arrival_s for one in requests) if "azure" in writer.__name__ else 0.0
    expected = sorted(requests, key=lambda one: one.arrival_s)
    assert trace.block_tokens == block_tokens
    assert trace.history == ()
    arrivals_s = [one.arrival_s - first_s for one in expected]
    assert [one.arrival_s for one in trace.requests] == pytest.approx(arrivals_s, abs=1e-6)
    assert [(one.prompt_tokens, one.output_tokens) for one in trace.requests] == [
        (one.prompt_tokens, one.output_tokens) for one in expected
    ]
    if block_tokens:
        assert [one.prefix_blocks for one in trace.requests] == [one.prefix_blocks for one in expected]


def written(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


OWN = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
WRONG: list[tuple[str, str | bytes, str, str]] = [
    ("negative time", OWN + "0,1,1\n-0.5,1,1\n", "line 3", "an arrival at -0.5 s"),
    ("negative time, BurstGPT", BURST + "-5,ChatGPT,1,1,2,API log\n", "line 2", "an arrival at -5.0 s"),
    (
        "negative time, Mooncake",
        '{"timestamp":-1,"input_length":1,"output_length":1}',
        "line 1",
        "an arrival at -0.001",
    ),
    ("missing column", "arrival_s,prompt_tokens\n0,1\n", "line 1", "no column output_tokens"),
    ("columns of nothing known", "a,b\n1,2\n", "line 1", "of no known trace"),
    ("a misspelt column", "arrival_s,prompt_tokens,output_tokens,prefix_blocks\n", "line 1", "prefix_blocks_N"),
    ("missing key", '{"timestamp":1,"input_length":1}', "line 1", "no output_length"),
    ("key missing later", '{"timestamp":1,"input_length":1,"output_length":1}\n{"timestamp":1}', "line 2", "no input_"),
    ("empty", "", ":", "an empty file"),
    ("blank", "\n \n", "line 2", "an empty file"),
    ("a header alone", OWN, "line 1", "no request that was answered"),
    ("only failed ones", BURST + "5,ChatGPT,10,0,10,API log\n", "line 2", "no request that was answered"),
    ("not a number", OWN + "0,1,1\n0,one,1\n", "line 3", "prompt_tokens is 'one', not a number"),
    ("a number of Python's", OWN + "0,1_0,1\n", "line 2", "prompt_tokens is '1_0', not a number"),
    ("NaN", OWN + "nan,1,1\n", "line 2", "arrival_s is nan, not a finite number"),
    ("NaN in JSON", '{"timestamp":NaN,"input_length":1,"output_length":1}', "line 1", "timestamp is nan, not a finite"),
    ("infinite", OWN + "1e999,1,1\n", "line 2", "not a finite number"),
    ("huge", '{"timestamp":1' + "0" * 400 + ',"input_length":1,"output_length":1}', "line 1", "not a finite number"),
    ("too many digits", '{"timestamp":1' + "0" * 5000 + ',"input_length":1,"output_length":1}', "line 1", "no JSON"),
    ("a truth", '{"timestamp":0,"input_length":true,"output_length":1}', "line 1", "input_length is 'True', not a num"),
    ("part of a token", OWN + "0,1.5,1\n", "line 2", "prompt_tokens is 1.5, not a whole number"),
    ("no tokens", OWN + "0,1,0\n", "line 2", "an answer of 0 tokens"),
    ("fewer than no tokens", AZURE + "2023-11-16 18:15:46.6805900,-3,4\n", "line 2", "a prompt of -3 tokens"),
    ("more tokens than there are", OWN + f"0,{10**9},1\n", "line 2", "a prompt of 1000000000 tokens"),
    ("no time", AZURE + "yesterday,3,4\n", "line 2", "timestamp is 'yesterday', not a time"),
    ("too few fields", OWN + "0,1\n", "line 2", "2 fields under 3 columns"),
    ("an open quote", OWN + '0,"1,1\n', "line 2", "not CSV"),
    ("no JSON", '{"timestamp":1,\n', "line 1", "no JSON object"),
    ("JSON of another kind", '{"timestamp":1,"input_length":1,"output_length":1}\n[]', "line 2", "not a JSON object"),
    ("deep JSON", '{"a":' + "[" * 200_000, "line 1", "nested too deep"),
    ("hashes that are none", '{"timestamp":1,"input_length":1,"output_length":1,"hash_ids":7}', "line 1", "not a list"),
    ("rubbish", bytes(range(256)) * 4, "line 1", "not a text file"),
    ("rubbish later", OWN.encode() + b"0,1,1\n0,\xff\xfe,1\n", "line 3", "not a text file"),
    ("a row of 10 MB", OWN + "0,1," + "1" * 10_000_000, "line 2", f"a row of more than {LINE_BYTES_MAX} bytes"),
    ("a pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:a4d0\n", "line 1", "a Git LFS pointer"),
]


@pytest.mark.parametrize(("text", "place", "why"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_what_is_wrong_is_named(tmp_path: Path, text: str | bytes, place: str, why: str, packed: bool) -> None:
    raw = text if isinstance(text, bytes) else text.encode()
    path = written(tmp_path, gzip.compress(raw) if packed else raw)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(path) in caught.value.what
    assert place in caught.value.what
    assert why in caught.value.what
    assert caught.value.expected
    assert caught.value.to_do
    assert len(str(caught.value)) < 2000


def test_a_packed_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    rows = "".join(f"{at},{at * 7919 % 1000 + 1},{at * 104729 % 1000 + 1}\n" for at in range(5000))
    whole = gzip.compress((OWN + rows).encode())
    broken = bytearray(whole)
    broken[len(broken) // 2] ^= 0xFF
    for bad in (whole[: len(whole) // 2], bytes(broken), whole[:5], whole[:10] + b"\xff" * 50):
        with pytest.raises(ConfigError) as caught:
            read_trace(written(tmp_path, bad, "t.csv.gz"))
        assert "t.csv.gz" in caught.value.what


def test_only_a_file_can_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases = [
        (tmp_path, "a directory"),
        (tmp_path / "none", "No such file"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("a\0b"), "null"),
        (written(tmp_path, OWN + "0,1,1\n", "t.csv.gz"), "not gzip, though named so"),
    ]
    for path, why in cases:
        with pytest.raises(ConfigError, match=why) as caught:
            read_trace(path)
        assert caught.value.to_do


def test_failed_requests_of_a_public_trace_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = ["5,ChatGPT,472,18,490,API log", "45,ChatGPT,1087,0,1087,API log", "118,GPT-4,417,276,693,API log"]
    trace = read_trace(written(tmp_path, BURST + "\n".join(rows)))
    assert [one.arrival_s for one in trace.requests] == [5.0, 118.0]
    assert trace.history == ("left out 1 failed requests, which have no prompt or no answer",)


def test_a_byte_order_mark_and_other_spellings_of_a_column_do_no_harm(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "\ufefftimestamp, contexttokens,GENERATEDTOKENS\n2023-11-16T18:15:46Z,3.0,4"))
    assert trace.requests == (TraceRequest(0.0, 3, 4),)


def test_a_trace_out_of_order_is_put_in_order(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, OWN + "2,1,1\n1,2,2\n1,3,3\n"))
    assert [one.prompt_tokens for one in trace.requests] == [2, 3, 1]
    assert trace.length_s == 2.0


def test_more_requests_than_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "REQUESTS_MAX", 2)
    path = written(tmp_path, OWN + "0,1,1\n" * 2)
    assert len(read_trace(path).requests) == 2
    with pytest.raises(ConfigError, match="line 4: more than 2 requests"):
        read_trace(written(tmp_path, OWN + "0,1,1\n" * 3))


def test_the_shipped_traces_are_whole_and_attributed() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert {path.name.removesuffix(".csv.gz") for path in FOLDER.glob("*.gz")} == set(ATTRIBUTIONS)
    for name, rows in (("azure_2023_code", 8819), ("azure_2023_conv", 19366)):
        trace = shipped_trace(name)
        assert len(trace.requests) == rows
        assert f"`{name}.csv.gz` | {rows:,} |" in readme
        assert "CC-BY 4.0" in trace.attribution
        assert trace.name == name
    assert named_trace(str(FOLDER / "azure_2023_code.csv.gz")).requests == shipped_trace("azure_2023_code").requests
    with pytest.raises(ConfigError, match="no shipped trace 'azure'"):
        shipped_trace("azure")
    with pytest.raises(ConfigError, match="azure: No such file"):
        named_trace("azure")


ONE = TraceRequest(1.0, 1, 1, (3,))
GOOD = Trace("t", "a", (ONE, TraceRequest(2.0, 1, 1)), 2.0, block_tokens=16)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"requests": ()}, "without requests"),
        ({"requests": (TraceRequest(2.0, 1, 1), ONE)}, "not in order"),
        ({"length_s": 1.9}, "a length of 1.9 s"),
        ({"length_s": float("nan")}, "a length of nan s"),
        ({"block_tokens": 0.0}, "prefix blocks of no size"),
        ({"block_tokens": -1.0}, "prefix blocks of -1.0 tokens"),
        ({"block_tokens": float("inf")}, "prefix blocks of inf tokens"),
    ],
)
def test_a_trace_holds_its_invariants(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(GOOD, **changes)  # type: ignore[arg-type]
