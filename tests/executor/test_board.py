"""The board: what is written is read; whatever is wrong with it is seen as such, and nobody dies of it."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ClusterError, ContractError
from rose_executor import board, board_halves
from rose_executor.board import GUEST, QUOTA, SERVING, SERVING_KV, BoardReader, HalfWriter, claim_quota
from rose_executor.board_halves import BOARD_BYTES, HEADER, LAYOUT, MAGIC, NUMBER_MAX, encode
from rose_executor.board_states import GuestState, Quota, Reading, ServingKv, ServingState

NOW_S = 1000.0
NOW_NS = 1000 * 10**9
BANK = board_halves.BANK_BYTES
QUOTA_A = Quota(kv_blocks=10, tokens_per_step=64, active_seqs=8, gate_open=True)
QUOTA_B = Quota(kv_blocks=5, tokens_per_step=0, active_seqs=4, gate_open=False)
SERVED = ServingState(
    steps=7,
    arrivals=12,
    running=3,
    waiting=2,
    decoding=2,
    unanswered=4,
    oldest_unanswered_at_s=990.25,
    stepped_at_s=999.5,
    step_s=0.0125,
    step_tokens=67,
    next_step_s=0.0625,
    first_token_s=0.125,
    kv_blocks_used=40,
    kv_blocks_total=511,
    busy_s=3.5,
)
GUESSED = GuestState(
    steps=9,
    computed_steps=8,
    quota_number=2,
    running=4,
    waiting=1,
    kv_blocks_used=30,
    kv_blocks_total=511,
    kv_gives_back=True,
    step_s=0.02,
    step_tokens=64,
    busy_s=2.25,
    slack_s=0.25,
    allowed_tokens=128,
    allowed_seqs=16,
    open_s=1.75,
    preemptions=5,
    moved=3,
    starvations=1,
    profile_steps=300,
    step_margin=1.75,
    drifted_at_s=980.5,
    drift_factor=2.5,
)


def decode(page: bytes, half: board.Half[board.S], now_s: float) -> Reading[board.S]:
    return board_halves.decode(page, half, now_s, board.header())


def page(*banks: tuple[int, bytes]) -> bytes:
    """A whole board's bytes, with banks at offsets."""
    content = bytearray(BOARD_BYTES)
    header = board.header()
    content[: len(header)] = header
    for offset, bank in banks:
        content[offset : offset + len(bank)] = bank
    return bytes(content)


def quota_page(*quotas: Quota, written_at_ns: int = NOW_NS) -> bytes:
    """A board after these writes."""
    return page(
        *(
            (QUOTA.offset + BANK * (number % 2), encode(QUOTA, quota, number, written_at_ns))
            for number, quota in enumerate(quotas, start=1)
        )
    )


def test_each_half_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "board"
    quota = claim_quota(path)
    serving, guest, reader = HalfWriter(path, SERVING), HalfWriter(path, GUEST), BoardReader(path)
    for _ in range(3):
        quota.write(QUOTA_A)
        serving.write(SERVED)
        guest.write(GUESSED)
    now_s = time.monotonic()
    assert (reader.read(QUOTA, now_s).state, reader.read(QUOTA, now_s).number) == (QUOTA_A, 3)
    assert reader.read(SERVING, now_s).state == SERVED
    assert reader.read(GUEST, now_s).state == GUESSED
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_reader_has_seen_before_grows_stale_all_the_same_and_gives_way_to_what_is_new(tmp_path: Path) -> None:
    writer = claim_quota(tmp_path / "board")
    reader = BoardReader(tmp_path / "board")
    writer.write(QUOTA_A)
    now_s = time.monotonic()
    assert [reader.read(QUOTA, now_s + later_s).state for later_s in (0.0, 0.1, 5.0)] == [QUOTA_A, QUOTA_A, None]
    assert reader.read(SERVING, now_s).why == "the serving half was never written"
    writer.write(QUOTA_B)
    assert reader.read(QUOTA, time.monotonic()).state == QUOTA_B


def test_the_last_write_is_the_one_that_is_read() -> None:
    assert decode(quota_page(QUOTA_A, QUOTA_B), QUOTA, NOW_S).state == QUOTA_B
    assert decode(quota_page(QUOTA_A, QUOTA_B, QUOTA_A), QUOTA, NOW_S).state == QUOTA_A


@pytest.mark.parametrize("cut", range(1, BANK))
def test_a_writer_killed_at_any_store_leaves_the_state_before(cut: int) -> None:
    """However much of the third write arrived, the reader has the second, and never a mixture."""
    before = quota_page(QUOTA_A, QUOTA_B)
    after = quota_page(QUOTA_A, QUOTA_B, Quota(2**62, 3, 99, gate_open=True))
    start = QUOTA.offset + BANK
    torn = before[:start] + after[start : start + cut] + before[start + cut :]
    assert torn in (before, after) or decode(torn, QUOTA, NOW_S).state == QUOTA_B


@given(st.data())
def test_no_damage_is_taken_for_a_state(data: st.DataObject) -> None:
    """Any bytes changed anywhere in the half: one of the two states that were written, or unknown."""
    content = bytearray(quota_page(QUOTA_A, QUOTA_B))
    at = data.draw(st.integers(QUOTA.offset, QUOTA.offset + 2 * BANK - 1))
    damage = data.draw(st.binary(min_size=1, max_size=200))
    content[at : at + len(damage)] = damage
    reading = decode(bytes(content[:BOARD_BYTES]), QUOTA, NOW_S)
    assert reading.state in (None, QUOTA_A, QUOTA_B)
    assert (reading.state is None) == bool(reading.why)


def test_both_banks_torn_is_said() -> None:
    content = bytearray(quota_page(QUOTA_A, QUOTA_B))
    content[QUOTA.offset + 20] ^= 1
    content[QUOTA.offset + BANK + 20] ^= 1
    assert decode(bytes(content), QUOTA, NOW_S).why == "the quota half is torn"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cut short: 0 of"),
        (page()[:-1], "cut short: 2559 of"),
        (b"hello" * 600, "not a board"),
        (bytes(BOARD_BYTES), "not a board"),
        (HEADER.pack(MAGIC, 99, board._boot()) + page()[32:], "layout 99, not"),
        (HEADER.pack(MAGIC, LAYOUT, bytes(16)) + page()[32:], "another boot"),
        (page(), "the quota half was never written"),
        (page((SERVING.offset, encode(QUOTA, QUOTA_A, 2, NOW_NS))), "the quota half was never written"),
        (page((QUOTA.offset, encode(SERVING, SERVED, 2, NOW_NS))), "the quota half is torn"),
    ],
)
def test_what_is_no_readable_half_is_unknown(content: bytes, why: str) -> None:
    reading = decode(content, QUOTA, NOW_S)
    assert reading.state is None
    assert why in reading.why


@pytest.mark.parametrize(
    ("half", "age_s", "known"), [(QUOTA, 0.4, True), (QUOTA, 0.6, False), (QUOTA, -0.4, True), (QUOTA, -9.0, False)]
)
def test_a_stale_half_is_unknown_and_so_is_one_from_the_future(
    half: board.Half[Quota], age_s: float, known: bool
) -> None:
    reading = decode(quota_page(QUOTA_A), half, NOW_S + age_s)
    assert (reading.state is not None) == known
    assert known or f"{age_s:.1f} s old" in reading.why
    assert reading.number == 1


def test_a_write_leaves_the_state_before_it_on_the_board(tmp_path: Path) -> None:
    path = tmp_path / "board"
    quota = claim_quota(path)
    for state in (QUOTA_A, QUOTA_B, QUOTA_A, QUOTA_B):
        quota.write(state)
    content = bytearray(path.read_bytes())
    newest = QUOTA.offset + BANK * (quota.number % 2)
    content[newest : newest + BANK] = b"\xee" * BANK
    path.write_bytes(content)
    assert BoardReader(path).read(QUOTA, time.monotonic()).state == QUOTA_A


def test_a_half_of_zeros_holds_no_state() -> None:
    assert all(decode(page(), half, 0.0).state is None for half in (SERVING, QUOTA, GUEST))


def test_a_board_replaced_while_it_is_claimed_is_claimed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two executors that start at once on a board that one of them removes: never two boards in force."""
    path = tmp_path / "board"
    lock, removed = board.lock_half, []

    def lock_and_remove(fd: int, path: Path, half: board.Half[Quota]) -> None:
        lock(fd, path, half)
        if not removed:
            removed.append(path.unlink())

    monkeypatch.setattr(board, "lock_half", lock_and_remove)
    quota = claim_quota(path)
    quota.write(QUOTA_A)
    assert BoardReader(path).read(QUOTA, time.monotonic()).state == QUOTA_A
    assert quota.whole()


@pytest.mark.parametrize("absurd", [2**63, -(2**63) - 1, float("nan"), float("inf")])
def test_a_value_that_no_board_holds_is_refused(absurd: float) -> None:
    with pytest.raises(ContractError, match="cannot stand on a board"):
        encode(QUOTA, Quota(absurd, 1, 1, gate_open=True), 1, NOW_NS)  # type: ignore[arg-type]


def test_a_half_has_one_writer_and_the_next_goes_on_counting(tmp_path: Path) -> None:
    path = tmp_path / "board"
    first = claim_quota(path)
    first.write(QUOTA_A)
    serving = HalfWriter(path, SERVING)
    serving.write(SERVED)
    with pytest.raises(ClusterError, match=r"quota half of the board .* has a live writer"):
        claim_quota(path)
    with pytest.raises(ClusterError, match="serving half"):
        HalfWriter(path, SERVING)
    first.close()
    second = claim_quota(path)
    second.write(QUOTA_B)
    reader = BoardReader(path)
    assert (reader.read(QUOTA, time.monotonic()).state, second.number) == (QUOTA_B, 2)
    assert reader.read(SERVING, time.monotonic()).state == SERVED


def test_the_state_of_a_half_that_never_grows_stale_is_as_good_as_its_writer_is_alive(tmp_path: Path) -> None:
    claim_quota(tmp_path / "board").close()
    reader, year_s = BoardReader(tmp_path / "board"), 365 * 86_400.0
    assert "never written" in reader.read_of_living(SERVING_KV, NOW_S).why
    writer = HalfWriter(tmp_path / "board", SERVING_KV)
    writer.write(ServingKv(3, 2, 1))
    assert reader.read_of_living(SERVING_KV, time.monotonic() + year_s).state == ServingKv(3, 2, 1)
    writer.close()
    assert reader.read_of_living(SERVING_KV, time.monotonic()).why == "the serving KV half has no live writer"
    assert reader.read(SERVING_KV, time.monotonic()).state == ServingKv(3, 2, 1)
    other = HalfWriter(tmp_path / "board", GUEST)
    assert reader.read_of_living(SERVING_KV, time.monotonic()).state is None
    other.close()


def _claim_and_die(path: Path) -> None:
    claim_quota(path).write(QUOTA_A)
    os.kill(os.getpid(), 9)


def test_a_killed_writer_leaves_its_half_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "board"
    child = multiprocessing.get_context("fork").Process(target=_claim_and_die, args=(path,))
    child.start()
    child.join(20)
    assert child.exitcode == -9
    assert BoardReader(path).read(QUOTA, time.monotonic()).state in (QUOTA_A, None)
    assert claim_quota(path).number == 1


def _write_for_ever(path: Path) -> None:
    quota = claim_quota(path)
    while True:
        number = quota.number + 1
        quota.write(Quota(number, number, number, gate_open=bool(number % 2)))


@pytest.mark.parametrize("attempt", range(3))
def test_a_reader_beside_a_writer_and_after_its_death_sees_whole_states(tmp_path: Path, attempt: int) -> None:
    path = tmp_path / "board"
    claim_quota(path).close()
    child = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(path,))
    child.start()
    reader, numbers = BoardReader(path), [0]
    try:
        deadline_s = time.monotonic() + 20
        while len(set(numbers)) < 500:
            assert time.monotonic() < deadline_s
            numbers.append(_number(reader))
    finally:
        child.kill()
        child.join(20)
    numbers.append(_number(reader))
    assert numbers[-1] == max(numbers)


def _number(reader: BoardReader) -> int:
    """What the quota half holds, 0 if nothing yet; its values are one another's."""
    reading = reader.read(QUOTA, time.monotonic())
    if reading.state is None:
        return 0
    assert reading.state == Quota(*[reading.number] * 3, gate_open=bool(reading.number % 2))
    return reading.number


@pytest.mark.parametrize("cut_to", [0, 8, 300, BOARD_BYTES - 1])
def test_a_board_cut_short_kills_nobody_and_its_owner_mends_it(tmp_path: Path, cut_to: int) -> None:
    path = tmp_path / "board"
    quota = claim_quota(path)
    serving, reader = HalfWriter(path, SERVING), BoardReader(path)
    serving.write(SERVED)
    os.truncate(path, cut_to)
    assert reader.read(SERVING, time.monotonic()).state is None
    assert not quota.whole()
    assert not serving.whole()
    serving.write(SERVED)  # makes the file longer, with a hole where the header was
    assert reader.read(SERVING, time.monotonic()).state is None
    quota.close()
    quota = claim_quota(path)
    assert quota.whole()
    assert serving.whole()
    serving.write(SERVED)
    assert reader.read(SERVING, time.monotonic()).state == SERVED


def test_a_board_of_another_layout_is_nobodys_to_write_until_an_executor_has_come(tmp_path: Path) -> None:
    """As a crashed run of another release leaves it: engines wait, the executor starts over it, engines find it."""
    path = tmp_path / "board"
    left = HEADER.pack(MAGIC, LAYOUT - 1, board._boot()) + b"\xff" * 5000
    path.write_bytes(left)
    for half in (SERVING, GUEST, QUOTA):
        with pytest.raises(ClusterError, match=f"is not a whole board of layout {LAYOUT}"):
            HalfWriter(path, half)  # type: ignore[arg-type, var-annotated]
    assert path.read_bytes() == left
    reader = BoardReader(path)
    assert "layout" in reader.read(QUOTA, time.monotonic()).why
    quota = claim_quota(path)
    quota.write(QUOTA_A)
    assert path.stat().st_size == BOARD_BYTES
    serving = HalfWriter(path, SERVING)
    serving.write(SERVED)
    assert reader.read(QUOTA, time.monotonic()).state == QUOTA_A
    assert reader.read(SERVING, time.monotonic()).state == SERVED
    assert reader.read(GUEST, time.monotonic()).why == "the guest half was never written"


def test_a_board_of_another_layout_that_a_living_executor_holds_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "board"
    other = claim_quota(path)
    os.pwrite(other._fd, HEADER.pack(MAGIC, LAYOUT + 1, board._boot()), 0)  # it is of a later release
    before = path.read_bytes()
    with pytest.raises(ClusterError, match="has a live writer"):
        claim_quota(path)
    assert path.read_bytes() == before
    other.close()
    claim_quota(path).close()


def test_a_removed_board_is_seen_by_those_who_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "board"
    quota = claim_quota(path)
    reader = BoardReader(path)
    assert quota.whole()
    assert not reader.replaced()
    path.unlink()
    assert not quota.whole()
    assert reader.replaced()


def test_a_file_that_is_something_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(ClusterError, match="something else than a board"):
        claim_quota(path)
    assert path.read_text() == "dear diary"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ClusterError, match="something else than a board"):
        claim_quota(tmp_path / "pipe")
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ClusterError, match="cannot open the board"):
        claim_quota(link)
    with pytest.raises(ClusterError, match="cannot open the board"):
        claim_quota(tmp_path / "absent" / "board")


@pytest.mark.parametrize(
    "content",
    [
        b"R",
        b"ROSE",
        MAGIC[:7] + bytes(50),
        bytes(16) + b"data",
        bytes(BOARD_BYTES - 1) + b"x",
        bytes(BOARD_BYTES + 1),
        bytes(1024) + b"precious" * 1000,
        bytes(QUOTA.offset) + encode(QUOTA, QUOTA_A, 2, NOW_NS)[:-1] + b"x",
        bytes(QUOTA.offset) + encode(SERVING, SERVED, 2, NOW_NS),
    ],
)
def test_a_file_that_begins_as_a_board_in_the_making_does_is_not_taken_for_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "image"
    path.write_bytes(content)
    with pytest.raises(ClusterError, match="something else than a board"):
        claim_quota(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(100),
        bytes(BOARD_BYTES),
        bytes(SERVING.offset) + encode(SERVING, SERVED, 2, NOW_NS),
        bytes(GUEST.offset + BANK) + encode(GUEST, GUESSED, 3, NOW_NS) + bytes(7),
    ],
)
def test_a_board_whose_maker_was_killed_or_that_was_emptied_is_made_whole(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "board"
    path.write_bytes(content)
    quota = claim_quota(path)
    assert quota.whole()
    quota.write(QUOTA_A)
    assert BoardReader(path).read(QUOTA, time.monotonic()).state == QUOTA_A


@pytest.mark.parametrize("number", [2**63 - 1, NUMBER_MAX + 1, -1, -(2**63)])
def test_a_count_of_writes_that_no_writer_gets_to_begins_anew(tmp_path: Path, number: int) -> None:
    """Left with a right checksum by whoever may write the file: nobody's write fails of it, nor is its state read."""
    path = tmp_path / "board"
    claim_quota(path).close()
    for half, state in ((QUOTA, QUOTA_B), (SERVING_KV, ServingKv(3, 2, 1))):
        with path.open("r+b") as file:
            file.seek(half.offset)
            for forged in (number, number ^ 1):
                file.write(encode(half, state, forged, time.monotonic_ns()))  # type: ignore[arg-type, misc]
        writer = HalfWriter(path, half)  # type: ignore[var-annotated, arg-type]
        assert writer.number == 0
        reader = BoardReader(path)
        assert "never written" in reader.read(half, time.monotonic()).why  # type: ignore[arg-type]
        for written in (1, 2, 3):
            writer.write(state)
            assert reader.read(half, time.monotonic()) == Reading(state, written)  # type: ignore[arg-type]
        writer.close()


def test_the_highest_count_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "board"
    claim_quota(path).close()
    with path.open("r+b") as file:
        file.seek(QUOTA.offset)
        file.write(encode(QUOTA, QUOTA_B, NUMBER_MAX, time.monotonic_ns()))
    quota = HalfWriter(path, QUOTA)
    quota.write(QUOTA_A)
    assert BoardReader(path).read(QUOTA, time.monotonic()) == Reading(QUOTA_A, NUMBER_MAX + 1)


def test_a_half_that_cannot_be_emptied_is_said_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "board"
    claim_quota(path).close()
    with path.open("r+b") as file:
        file.seek(QUOTA.offset)
        file.write(encode(QUOTA, QUOTA_B, -4, time.monotonic_ns()))
    with monkeypatch.context() as patched:
        patched.setattr(board, "write_at", full)
        with pytest.raises(ClusterError, match=r"cannot empty the quota half of .*: No space left"):
            HalfWriter(path, QUOTA)
    assert HalfWriter(path, QUOTA).number == 0


def test_what_a_writer_forks_neither_holds_its_half_nor_writes_on_it(tmp_path: Path) -> None:
    path = tmp_path / "board"
    claim_quota(path).close()
    before = path.read_bytes()
    writer = HalfWriter(path, SERVING_KV)
    forked, ended = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        try:
            writer.write(ServingKv(9, 9, 9))
            os.write(forked[1], bytes([writer.whole(), _is_refused(path)]))
            os.close(ended[1])
            os.read(ended[0], 1)
        finally:
            os._exit(0)
    try:
        assert os.read(forked[0], 2) == bytes([False, True]), "the parent's half is the child's, too"
        assert path.read_bytes() == before
        reader = BoardReader(path)
        writer.write(ServingKv(3, 2, 1))
        assert reader.read_of_living(SERVING_KV, time.monotonic()).state == ServingKv(3, 2, 1)
        writer.close()  # as the kernel does for a process that is killed
        assert reader.read_of_living(SERVING_KV, time.monotonic()).why == "the serving KV half has no live writer"
        HalfWriter(path, SERVING_KV).close()
    finally:
        os.close(ended[1])
        os.waitpid(child, 0)
        for end in (*forked, ended[0]):
            os.close(end)


def _is_refused(path: Path) -> bool:
    try:
        HalfWriter(path, SERVING_KV)
    except ClusterError:
        return True
    return False


def test_no_space_for_a_board_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ClusterError, match=r"cannot make the board .*No space left"):
        claim_quota(tmp_path / "board")
