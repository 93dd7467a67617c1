"""What comes from a broken or hostile server is refused by a limit that says its name, in work that follows its bytes.

Work is counted in calls that Python makes, so the tests say the same on any machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from distribution_tools import PATIENT, site
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import PACKING
from transport_tools import TOKEN, Memory

from rose.errors import TransferError
from rose_transfer.distribution import following, way
from rose_transfer.distribution.way import Way, ask_of
from rose_transfer.layout.box import Box
from rose_transfer.layout.holdings import Region
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter, Piece
from rose_transfer.live import wanted_buckets
from rose_transfer.store import BucketEntry, BucketId, Manifest, Packing, canonical, manifest, object_key, packing
from rose_transfer.store.canonical import Kind, MalformedRecord
from rose_transfer.store.packing import pack_regions, pack_whole
from rose_transfer.transport.tcp import TcpServer

PACKING_KEY = object_key(PACKING.to_bytes())


def a_manifest(version: int, base: int | None, buckets: int = 3) -> Manifest:
    """In steps from another version, whose bits it says to know."""
    entries = tuple(
        BucketEntry(BucketId("all", index), object_key(b"%d %d" % (version, index)), 1, 100, 4096, base or 0, version)
        for index in range(buckets)
    )
    return Manifest(version, base, "overwrite" if base is None else "steps", PACKING_KEY, entries)


A_WAY = Way(7, "a" * 64, 5, (("b" * 64, False), ("c" * 64, True)))
TEXTS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "way": (A_WAY.to_bytes(), way.from_bytes),
    "manifest": (a_manifest(7, 6).to_bytes(), manifest.from_bytes),
    "packing": (PACKING.to_bytes(), packing.from_bytes),
}
KINDS = {"way": way.TEXT, "manifest": manifest.TEXT, "packing": packing.TEXT}


def calls_of(work: Callable[[], object]) -> int:
    """How many functions `work` calls, those of C included."""
    made = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return made


def refused_or_the_same(read: Callable[[bytes], Any], text: bytes) -> None:
    try:
        value = read(text)
    except TransferError as refusal:
        value, said = None, str(refusal)
    assert len(said) < 1000 if value is None else value.to_bytes() == text


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, 2**31, 2**62, 2**63 - 1, 10**300])
    | st.text(max_size=5)
)


def nodes(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
        max_leaves=20,
    )


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as a container and a key in it."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [spot for key in keys for spot in spots(value[key])]


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_change_is_refused_or_another_record_in_bounded_work(name: str, data: st.DataObject) -> None:
    text, read = TEXTS[name]
    value = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        places = spots(value)
        if not places:
            break
        held, key = data.draw(st.sampled_from(places))
        match data.draw(st.sampled_from(["other", "doubled", "gone", "nested"])):
            case "other":
                held[key] = data.draw(nodes(LEAVES | st.floats(allow_nan=False)))
            case "doubled" if isinstance(held, list):
                held[key:key] = [held[key]] * data.draw(st.integers(1, 300))
            case "gone":
                del held[key]
            case _:
                held[key] = [held[key]]
    changed = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    assert calls_of(lambda: refused_or_the_same(read, changed)) < 2000 + 20 * len(changed)


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_refused_or_another_record(name: str, data: st.DataObject) -> None:
    text, read = TEXTS[name]
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 5)))
    refused_or_the_same(read, text[:at] + data.draw(st.binary(max_size=4)) + text[end:])


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_refused_by_its_size_before_it_is_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, read = TEXTS[name]
    kind = KINDS[name]
    monkeypatch.setattr(canonical, "_Reader", None)
    with pytest.raises(MalformedRecord, match=f"{name} of {kind.bytes_max + 1} bytes") as told:
        read(bytes(kind.bytes_max + 1))
    assert str(kind.bytes_max) in str(told.value)
    with pytest.raises(MalformedRecord, match=f"{name} of {kind.values_max + 1} values"):
        read(b"[" * (kind.values_max + 1))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("packing", b'{"buckets":' + b"[" * 100_000),
        (
            "packing",
            b'{"buckets":[["all",0,"bfloat16",[["a",['
            + b"0," * 100_000
            + b"0],["
            + b"1," * 100_000
            + b'1]]]]],"layout":1,'
            b'"parameters":{"a":["bfloat16",[1]]}}',
        ),
        ("packing", b'{"buckets":[],"layout":1,"parameters":{"a":["bfloat16",[' + b"9," * 100_000 + b"9]]}}"),
        ("packing", b'{"buckets":[],"layout":' + b"9" * 1_000_000 + b',"parameters":{}}'),
        ("manifest", b'{"base":' + b"9" * 1_000_000 + b"}"),
        ("manifest", b'{"base":6,"buckets":[' + b"{}," * 100_000 + b"{}]}"),
        ("manifest", b'{"base":6,"buckets":[{"after":"' + b"f" * 1_000_000 + b'"}]}'),
        ("manifest", b'{"mode":"' + b"f" * 1_000_000 + b'"}'),
        ("way", b'{"steps":[' + b"[[],0]," * 500 + b"[]]}"),
        ("way", b'{"' + b"f" * 100_000 + b'":1}'),
    ],
)
def test_what_grows_without_bound_is_refused_in_a_few_steps(name: str, text: bytes) -> None:
    """Nested, numerous, long: the number of steps follows what was read, and what it says of it is short."""
    _, read = TEXTS[name]

    def refused() -> None:
        with pytest.raises(MalformedRecord) as told:
            read(text)
        assert len(str(told.value)) < 1000

    assert calls_of(refused) < 2000


@pytest.mark.parametrize(
    ("shape", "says"),
    [((1,) * 9, "9 axes|shape|at most 8"), ((2**62, 4), "shape"), ((2**63 - 1,) * 8, "shape")],
)
def test_no_parameter_has_more_axes_or_elements_than_arithmetic_is_for(shape: tuple[int, ...], says: str) -> None:
    text = canonical.dump({"buckets": [], "layout": 1, "parameters": {"a": ["bfloat16", shape]}}, packing.TEXT)
    with pytest.raises(MalformedRecord, match=says):
        packing.from_bytes(text)
    with pytest.raises(ValueError, match="shape"):
        Packing({"a": Parameter(shape, "bfloat16")}, ())


def test_regions_without_order_are_refused_in_work_that_follows_their_number() -> None:
    """Dominoes that interlock: no edge goes through, and many of them lie in a row with each other."""
    size = 60
    flat = [([0, i, j], [1, 1, 2]) for i in range(size) for j in range(size - 1) if (i + j) % 4 == 0]
    upright = [([0, i, j], [1, 2, 1]) for i in range(size - 1) for j in range(size) if (i + j) % 4 == 2]
    value = {
        "buckets": [["all", 0, "bfloat16", [["a", starts, sizes] for starts, sizes in flat + upright]]],
        "layout": 1,
        "parameters": {"a": ["bfloat16", [1, size, size]]},
    }
    text = canonical.dump(value, packing.TEXT)

    def refused() -> None:
        with pytest.raises(TransferError, match="interlock"):
            packing.from_bytes(text)

    assert calls_of(refused) < 20 * len(text)


def texts_of_items(value: dict[str, Any]) -> Iterator[str]:
    """What is decoded in one go: keys, and values but for lists and objects, of which it is their items."""
    for key, member in value.items():
        parts = list(itertools.chain(*member.items())) if isinstance(member, dict) else member
        for part in [key, *(parts if isinstance(parts, list) else [parts])]:
            yield json.dumps(part, sort_keys=True, separators=(",", ":"))


def test_a_packing_full_of_gaps_is_refused_in_work_that_follows_its_regions() -> None:
    """Each gap is a part of what the rank holds and the version does not."""
    rows = 4000
    parameters = {"a": Parameter((rows,), "bfloat16")}
    piece = Piece("a", Box((0,), (rows,)), "a", 0, (1,))
    layout = Layout("engine-0", parameters, {"a": LocalTensor((rows,), "bfloat16")}, (piece,))
    every_other = [Region("a", Box((row,), (1,))) for row in range(0, rows, 2)]
    described = packing.from_bytes(pack_regions(parameters, {"all": every_other}).to_bytes())

    def refused() -> None:
        with pytest.raises(TransferError, match=f"{rows // 2} elements are in no bucket"):
            wanted_buckets(described, [layout])

    assert calls_of(refused) < 200 * len(every_other)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=4), nodes(LEAVES), max_size=6), st.integers(1, 30))
def test_a_text_is_read_a_window_at_a_time_as_it_would_be_at_once(value: dict[str, Any], window: int) -> None:
    kind = Kind("record", 2**20, 2**16)
    text = canonical.dump(value, kind)
    assert text == json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "ITEM_CHARS_MAX", window)
        longest = max((len(text) for text in texts_of_items(value)), default=0)
        with contextlib.nullcontext() if longest < window else pytest.raises(ValueError, match=f"at most {window} ch"):
            assert canonical.load(text, kind) == json.loads(text)
    assert canonical.load(text, kind) == json.loads(text)
    canonical.check(value, text, kind)
    for other in (text[:-1], text + b" ", b" " + text, text.replace(b":", b": ", 1) if value else b""):
        with pytest.raises(MalformedRecord):
            canonical.check(value, other, kind)


def test_what_nobody_would_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "TEXT", Kind("packing", 200, 1000))
    assert packing.from_bytes(pack_whole({"a": Parameter((4, 4), "bfloat16")}).to_bytes()).dense_bytes == 32
    with pytest.raises(TransferError, match="at most 200"):
        PACKING.to_bytes()


class Lying(Memory):
    """Answers every question for a way with `answer`, and has what objects it was given."""

    def __init__(self, answer: Way, *manifests: Manifest) -> None:
        super().__init__({found.key: found.to_bytes() for found in manifests} | {PACKING_KEY: PACKING.to_bytes()})
        self._answer = answer.to_bytes()

    def has(self, key: str) -> bool:
        if ask_of(key) is not None:
            self.objects[key] = self._answer
        return super().has(key)


def round_and_round() -> Lying:
    """To version 2, back to 1 and on to 3, by manifests that chain up."""
    whole, second, third = a_manifest(1, None), a_manifest(2, 1), a_manifest(3, 1)
    first = Manifest(1, None, "overwrite", PACKING_KEY, whole.buckets)
    steps = ((first.key, False), (second.key, False), (second_again(second).key, True), (third.key, False))
    return Lying(Way(3, third.fingerprint, None, steps), first, second, second_again(second), third)


def second_again(found: Manifest) -> Manifest:
    """The same step with other objects."""
    entries = tuple(replace(entry, key=object_key(entry.key.encode())) for entry in found.buckets)
    return replace(found, buckets=entries)


def many_objects() -> Lying:
    whole = a_manifest(1, None, buckets=50)
    onwards = a_manifest(2, 1, buckets=50)
    return Lying(Way(2, onwards.fingerprint, None, ((whole.key, False), (onwards.key, False))), whole, onwards)


def the_same_again() -> Lying:
    whole = a_manifest(1, None)
    return Lying(Way(1, whole.fingerprint, None, ((whole.key, False),) * 2), whole)


def many_steps() -> Lying:
    return Lying(Way(1, "0" * 64, None, tuple((f"{number:064x}", False) for number in range(way.STEPS_MAX + 1))))


@pytest.mark.parametrize(
    ("made", "goal", "says"),
    [
        (many_objects, 2, "at most 60|names more objects"),
        (the_same_again, 1, "named twice"),
        (round_and_round, 3, "comes by version 1 twice"),
        (many_steps, 1, f"{way.STEPS_MAX} are the most"),
    ],
)
def test_a_way_that_leads_on_and_on_is_refused(
    made: Callable[[], Lying], goal: int, says: str, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "OBJECTS_MAX", 60)

    async def check() -> None:
        source = made()
        async with site(memory_path) as here:
            server = TcpServer(source, token=TOKEN, waits=here.waits)
            await server.start()
            with pytest.raises(TransferError, match=says):
                await here.receiver(server.port).fetch(None, None, goal, deadline_s=PATIENT)
            await server.close()
        asked = {key for key, _ in source.read}
        assert not asked & {object_key(b"%d %d" % (version, index)) for version in (1, 2) for index in range(50)}

    asyncio.run(check())
