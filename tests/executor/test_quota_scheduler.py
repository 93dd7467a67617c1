"""A real guest under quotas that change in mid-generation: kept in the very step, nothing lost, nothing different."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_weight_update import Versions, updated

from rose.errors import EngineError
from rose.records import Finish
from rose_executor.board import GUEST, SERVING, BoardReader, HalfWriter, claim_quota
from rose_executor.board_states import GuestState, Quota, ServingState
from rose_executor.profile_key import ProfileKey
from rose_executor.profile_store import ProfileStore
from rose_executor.stalled import SET_BACKS_MAX
from rose_executor.step_drift import BAND
from rose_executor.step_profile import StepProfile
from rose_executor.step_shape import StepShape
from rose_executor.token_route import TokenRoute
from rose_transfer.snapshot import WEIGHTS

pytestmark = [pytest.mark.engine, pytest.mark.each_vllm]

BLOCKS = 400
TOKENS = 160
PROMPTS = [[(7 + 11 * i + 3 * j) % 90 for j in range(20 + 13 * i)] for i in range(8)]
FREE = Quota(kv_blocks=BLOCKS, tokens_per_step=4096, active_seqs=16, gate_open=True)


class Guest:
    """A guest engine, and the quota half of its board in the test's hand."""

    def __init__(self, rig: Any, engine: Any, path: Path) -> None:
        self.rig, self.engine, self.path = rig, engine, path
        self.quota, self.renewing = FREE, True
        self.writer = claim_quota(path)
        self.reader = BoardReader(path)
        self.seen: list[tuple[Quota, GuestState]] = []
        self._quotas: dict[int, Quota] = {}

    def give(self, quota: Quota) -> int:
        """Put a quota on the board; its number."""
        self.quota = quota
        self.writer.write(quota)
        self._quotas[self.writer.number] = quota
        return self.writer.number

    def state(self) -> GuestState | None:
        state = self.reader.read(GUEST, asyncio.get_running_loop().time()).state
        if state is not None and state.quota_number in self._quotas:
            self.seen.append((self._quotas[state.quota_number], state))
        return state

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """The executor's part: renew the quota, and look at what the guest says."""

        async def renew() -> None:
            while True:
                if self.renewing:
                    self.give(self.quota)
                for _ in range(10):
                    self.state()
                    await asyncio.sleep(0.002)

        self.give(self.quota)
        task = asyncio.create_task(renew())
        try:
            yield
        finally:
            task.cancel()
            self.quota, self.renewing = FREE, True

    async def until(self, what: Callable[[GuestState], bool]) -> GuestState:
        async with asyncio.timeout(60):
            while (state := self.state()) is None or not what(state):
                await asyncio.sleep(0.001)
        return state

    async def taken(self, quota: Quota) -> GuestState:
        """The first report seen with this quota, or a later one, in force."""
        number = self.give(quota)
        return await self.until(lambda state: state.quota_number >= number)

    async def taken_unless(self, over: asyncio.Task[Any], quota: Quota) -> None:
        """As `taken`; an idle guest takes nothing."""
        number = self.give(quota)
        await self.until(lambda state: state.quota_number >= number or over.done())

    def route(self) -> TokenRoute:
        return TokenRoute(self.engine.base_url, self.rig.session, engine_id="guest", waits=self.rig.waits)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def guest(request: pytest.FixtureRequest, rig: Any) -> Iterator[Guest]:
    path = rig.folder / f"board-{request.param}"
    engine = rig.new_engine("guest", board=path, async_scheduling=request.param)
    made = Guest(rig, engine, path)
    rig.run(engine.start(0))
    yield made
    rig.run(engine.stop())


async def greedy(route: Any, name: str, tokens: int = TOKENS, **more: Any) -> list[tuple[int, ...]]:
    asked = (
        route.generate(f"{name}-{index}", prompt, max_tokens=tokens, temperature=0.0, stop_token_ids=(), **more)
        for index, prompt in enumerate(PROMPTS)
    )
    return [tuple(output.output_ids) for output in await asyncio.wait_for(asyncio.gather(*asked), 90)]


async def usage_falls_to(guest: Guest, most: float) -> None:
    """The share of its KV cache that the engine itself says is in use; it may say so after the board."""
    async with asyncio.timeout(30):
        while True:
            async with guest.rig.session.get(f"{guest.engine.base_url}/metrics") as response:
                text = await response.text()
            (figure,) = re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (.*)$", text, re.MULTILINE)
            if float(figure) <= most:
                return
            await asyncio.sleep(0.02)


def test_quotas_that_change_in_mid_generation_change_no_token(guest: Guest) -> None:
    """Memory, tokens, sequences and gate at random: each report keeps to its quota, each output is the undisturbed."""
    seeded = random.Random(3)

    def drawn() -> Quota:
        return Quota(
            kv_blocks=seeded.choice((0, 12, 20, 40, BLOCKS)),
            tokens_per_step=seeded.choice((0, 1, 5, 64, 4096)),
            active_seqs=seeded.choice((0, 1, 3, 16)),
            gate_open=seeded.random() < 0.8,
        )

    async def run() -> None:
        reference = await greedy(guest.rig.route(), f"reference-{guest.path.name}")
        guest.seen.clear()
        async with guest.renewed():
            before = (await guest.until(lambda _: True)).preemptions if guest.state() else 0
            streams = asyncio.create_task(greedy(guest.route(), "disturbed"))
            for _ in range(40):
                await guest.taken(drawn())
                await asyncio.sleep(0.01)
                if streams.done():
                    break
            guest.give(FREE)
            assert await streams == reference
        assert all(state.kv_blocks_used <= quota.kv_blocks for quota, state in guest.seen)
        assert all(state.running <= quota.active_seqs for quota, state in guest.seen)
        assert max(state.preemptions for _, state in guest.seen) > before
        assert guest.engine.page.request("disturbed-0").tokens == TOKENS
        assert guest.engine.page.kv_tokens > 0
        assert guest.engine.page.token_s > 0

    guest.rig.run(run())


def test_a_cut_sets_back_the_newest_and_lets_the_oldest_go_on(guest: Guest) -> None:
    async def run() -> None:
        ended: list[int] = []

        async def one(index: int) -> None:
            await guest.route().generate(
                f"order-{index}", PROMPTS[index], max_tokens=TOKENS, temperature=0.0, stop_token_ids=()
            )
            ended.append(index)

        async with guest.renewed():
            # In order, and before any runs: on a busy machine the first could be over before the last is there.
            guest.give(Quota(BLOCKS, 4096, 16, gate_open=False))
            tasks = []
            for index in range(3):
                tasks.append(asyncio.create_task(one(index)))
                await guest.until(lambda state, most=index: state.waiting > most)
            guest.give(FREE)
            await guest.until(lambda state: state.kv_blocks_used >= 8)
            # As many as the oldest will need in the end.
            cut = await guest.taken(Quota(kv_blocks=6, tokens_per_step=4096, active_seqs=16, gate_open=True))
            assert cut.kv_blocks_used <= 6
            assert 1 <= cut.running < 3
            assert cut.running + cut.waiting == 3
            await asyncio.wait_for(tasks[0], 30)
            assert ended[0] == 0
            guest.give(FREE)
            await asyncio.wait_for(asyncio.gather(*tasks), 30)

    guest.rig.run(run())


@pytest.mark.parametrize(
    "shut", [Quota(BLOCKS, 4096, 16, gate_open=False), Quota(BLOCKS, 0, 16, gate_open=True)], ids=["gate", "no-tokens"]
)
def test_a_shut_gate_stops_the_very_step_and_the_engine_still_answers(guest: Guest, shut: Quota) -> None:
    async def run() -> None:
        async with guest.renewed():
            # Before any runs: on a busy machine the first could be over before the last is there.
            guest.give(Quota(BLOCKS, 4096, 16, gate_open=False))
            streams = asyncio.create_task(greedy(guest.route(), f"gated-{shut.gate_open}"))
            await guest.until(lambda state: state.waiting == len(PROMPTS))
            guest.give(FREE)
            await guest.until(lambda state: state.running == len(PROMPTS) and state.computed_steps > 1)
            stopped = await guest.taken(shut)
            total = guest.engine.page.total()
            later = await guest.until(lambda state: state.steps >= stopped.steps + 20)
            assert later.busy_s >= stopped.busy_s > stopped.step_s > 0
            # Asynchronous scheduling may have had one step under way.
            assert later.computed_steps <= stopped.computed_steps + 1
            assert guest.engine.page.total() <= total + len(PROMPTS)
            assert (later.running, later.starved_at_s) == (len(PROMPTS), 0.0)
            assert (await guest.engine.control.describe()).weight_version == 0
            await guest.engine.control.pause()
            assert (await guest.engine.control.describe()).paused
            await guest.engine.control.resume()
            guest.give(FREE)
            await streams

    guest.rig.run(run())


def test_a_quota_below_one_requests_need_starves_it_loudly(guest: Guest) -> None:
    async def run() -> None:
        async with guest.renewed():
            before = guest.state()
            guest.give(Quota(kv_blocks=1, tokens_per_step=4096, active_seqs=16, gate_open=True))
            streams = asyncio.create_task(greedy(guest.route(), "starved", tokens=40))
            starved = await guest.until(lambda state: state.starved_at_s > 0)
            assert starved.starvations == (0 if before is None else before.starvations) + 1
            assert starved.waiting == len(PROMPTS)
            await usage_falls_to(guest, 0.05)  # what is not allowed is not in use
            assert not streams.done()
            fed = await guest.taken(FREE)
            assert fed.starved_at_s == 0.0
            await streams

    guest.rig.run(run())


async def resumed(guest: Guest, outputs: list[Any], name: str) -> list[tuple[int, ...]]:
    """What was given back, continued on an engine that nobody cuts."""
    route = guest.rig.route()

    async def one(index: int, output: Any) -> tuple[int, ...]:
        left = TOKENS - len(output.output_ids)
        if not left:
            return tuple(output.output_ids)
        prompt = [*PROMPTS[index], *output.output_ids]
        rest = await route.generate(f"{name}-rest-{index}", prompt, max_tokens=left, temperature=0.0, stop_token_ids=())
        return (*output.output_ids, *rest.output_ids)

    return list(await asyncio.gather(*(one(index, output) for index, output in enumerate(outputs))))


async def outputs_of(guest: Guest, name: str) -> list[Any]:
    asked = (
        guest.route().generate(f"{name}-{index}", prompt, max_tokens=TOKENS, temperature=0.0, stop_token_ids=())
        for index, prompt in enumerate(PROMPTS)
    )
    return list(await asyncio.wait_for(asyncio.gather(*asked), 90))


def test_requests_that_may_not_compute_for_long_are_given_back_with_their_tokens(guest: Guest) -> None:
    async def run() -> None:
        reference = await greedy(guest.rig.route(), f"whole-{guest.path.name}")
        async with guest.renewed():
            guest.give(FREE._replace(tokens_per_step=4, move_after_s=0.3))
            streams = asyncio.create_task(outputs_of(guest, "moved"))
            await guest.until(lambda state: state.running > 2 and state.running + state.waiting == len(PROMPTS))
            guest.give(FREE._replace(gate_open=False, move_after_s=0.3))
            outputs = await streams
            assert {output.finish for output in outputs} == {Finish.ABORT}
            counts = [guest.engine.page.request(f"moved-{index}") for index in range(len(PROMPTS))]
            assert [(count.tokens, count.finished) for count in counts] == [
                (len(output.output_ids), True) for output in outputs
            ]
            empty = await guest.until(lambda state: state.running + state.waiting == 0)
            assert (empty.moved, empty.kv_blocks_used) == (len(PROMPTS), 0)
            guest.give(FREE)
            assert await resumed(guest, outputs, f"moved-{guest.path.name}") == reference

    guest.rig.run(run())


def test_nobody_is_set_back_for_ever(guest: Guest) -> None:
    """Memory comes and goes all the time: in the end the newest are given back, and nothing is lost."""

    async def run() -> None:
        reference = await greedy(guest.rig.route(), f"set-back-{guest.path.name}")
        async with guest.renewed():
            before = guest.state() or GuestState()
            streams = asyncio.create_task(outputs_of(guest, "thrown"))
            much = FREE._replace(tokens_per_step=16, move_after_s=60.0)
            while not streams.done():
                guest.give(much)
                await guest.until(lambda state: state.kv_blocks_used > 16 or streams.done())
                await guest.taken_unless(streams, much._replace(kv_blocks=14))
            outputs = await streams
            after = await guest.until(lambda state: state.running + state.waiting == 0)
            given_back = [output for output in outputs if output.finish is Finish.ABORT]
            assert given_back
            assert len(given_back) < len(PROMPTS)
            assert after.moved - before.moved == len(given_back)
            assert after.preemptions - before.preemptions <= SET_BACKS_MAX * len(PROMPTS)
            assert await resumed(guest, outputs, f"thrown-{guest.path.name}") == reference

    guest.rig.run(run())


def test_no_step_is_taken_that_serving_has_no_slack_for(guest: Guest) -> None:
    asking = FREE._replace(ttft_s=0.4, tpot_s=0.05)
    late = ServingState(steps=9, running=1, decoding=1, next_step_s=0.06)

    async def run() -> None:
        serving = HalfWriter(guest.path, SERVING)
        said = [late]

        async def say() -> None:
            # Each a step further: what the guest computes counts against one step of serving alone.
            for steps in itertools.count(9):
                serving.write(said[0]._replace(steps=steps))
                await asyncio.sleep(0.01)

        async with guest.renewed():
            saying = asyncio.create_task(say())
            guest.give(asking)
            streams = asyncio.create_task(greedy(guest.route(), "slack"))
            held = await guest.until(lambda state: state.waiting == len(PROMPTS))
            later = await guest.until(lambda state: state.steps >= held.steps + 20)
            assert (later.computed_steps, later.slack_s, later.allowed_tokens) == (held.computed_steps, 0.0, 0)
            assert later.starved_at_s == 0.0
            said[0] = late._replace(next_step_s=0.001, stepped_at_s=1e6)  # a step that ends at any moment
            await guest.until(lambda state: state.computed_steps > later.computed_steps and state.slack_s > 0.02)
            said[0] = ServingState()
            await streams
            saying.cancel()
            serving.close()

    guest.rig.run(run())


@pytest.mark.parametrize("absurd", [-(2**60), 2**60])
def test_absurd_quotas_hurt_nothing(guest: Guest, absurd: int) -> None:
    async def run() -> None:
        async with guest.renewed():
            state = asyncio.create_task(greedy(guest.route(), f"absurd-{absurd}", tokens=40))
            taken = await guest.taken(Quota(absurd, absurd, absurd, gate_open=True))
            assert absurd > 0 or (taken.running, taken.kv_blocks_used) == (0, 0)
            guest.give(FREE)
            assert len(await state) == len(PROMPTS)

    guest.rig.run(run())


def test_without_an_executor_the_guest_shuts_its_own_gate(guest: Guest) -> None:
    """The executor stops renewing; then its board is cut short, and at last removed. Each time it comes back."""

    async def stops_and_goes_on(harm: Callable[[], None], mend: Callable[[], None], name: str) -> None:
        async with guest.renewed():
            # Slowly, so that much is left to do when the quota grows stale.
            guest.give(Quota(BLOCKS, tokens_per_step=2, active_seqs=16, gate_open=True))
            streams = asyncio.create_task(greedy(guest.route(), name, tokens=380))
            await guest.until(lambda state: state.running > 0 and state.computed_steps > 0)
            guest.renewing = False
            harm()
            async with asyncio.timeout(30):
                total = -1
                while total != (total := guest.engine.page.total()):
                    await asyncio.sleep(0.7)
            assert total < guest_total + len(PROMPTS) * 380
            assert not streams.done()
            mend()
            guest.quota, guest.renewing = FREE, True
            await streams

    def mend() -> None:
        guest.writer.close()
        guest.writer = claim_quota(guest.path)
        guest.reader.close()
        guest.reader = BoardReader(guest.path)

    for name, harm in {
        "silent": lambda: None,
        "cut": lambda: os.truncate(guest.path, 0),
        "removed": guest.path.unlink,
    }.items():
        guest_total = guest.engine.page.total()
        guest.rig.run(stops_and_goes_on(harm, mend, name))


def test_new_weights_come_into_force_under_a_quota(guest: Guest, tmp_path: Path) -> None:
    """The prefix cache is emptied although the pool says that most blocks are not free. The guest's last test."""

    async def run() -> None:
        masters = {name: value.to(torch.float32) for name, value in load_file(guest.rig.model / WEIGHTS).items()}
        made = Versions(tmp_path, guest.rig.model).publish(1, updated(masters, 1))
        guest.seen.clear()
        async with guest.renewed():
            # Slowly, so that the update finds them at work.
            guest.give(Quota(kv_blocks=20, tokens_per_step=2, active_seqs=16, gate_open=True))
            streams = asyncio.create_task(greedy(guest.route(), "updated", tokens=380))
            await guest.until(lambda state: state.running > 1)
            await guest.engine.control.apply(made.version, made.objects, made.way)
            assert (await guest.engine.control.describe()).weight_version == 1
            assert not streams.done()
            guest.give(FREE)
            await streams
        assert all(state.kv_blocks_used <= quota.kv_blocks for quota, state in guest.seen)

    guest.rig.run(run())


def test_a_guest_says_how_well_its_own_profile_holds(rig: Any, tmp_path: Path) -> None:
    """It begins with one whose steps cost a twentieth of a real one's."""
    taught = StepProfile()
    for at in range(100):
        taught.saw(StepShape(1 + at % 16, 1 + at % 16, 100), 1e-4 * (1 + at % 3), float(at))
    state = taught.state()
    assert state is not None
    kept = ProfileStore(tmp_path).keep(ProfileKey("a model", "a processor", 1, "vllm", "any"), state)
    path = rig.folder / "drift-board"
    guest = Guest(rig, rig.new_engine("drifts", board=path, step_profile=kept), path)

    async def run() -> None:
        await guest.engine.start(0)
        async with guest.renewed():
            began_s = time.monotonic()
            streams = asyncio.create_task(greedy(guest.route(), "drift"))
            drifted = await guest.until(lambda state: state.step_margin > 1)
            assert drifted.drift_factor > BAND
            assert began_s < drifted.drifted_at_s < time.monotonic()
            assert 100 < drifted.profile_steps <= 100 + drifted.computed_steps
            await streams

    try:
        rig.run(run())
    finally:
        rig.run(guest.engine.stop())


def test_a_guest_without_a_board_does_not_start(rig: Any) -> None:
    engine = rig.new_engine("boardless", board=rig.folder / "no-board")
    with pytest.raises(EngineError, match="cannot open the board"):
        rig.run(engine.start(0))
