"""A guest's engine stepped by hand, under quotas, priorities, aborts and pauses at random; answers as JSON.

Called with a question (JSON: model, board, asynchronous, seeds, steps) and where to put the answer. For
`test_guest_fuzz`.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform

from rose_executor.board import GUEST, QUOTA, BoardReader, claim_quota
from rose_executor.board_states import GuestState, Quota
from rose_executor.engine_env import EngineEnv

BLOCKS, SEQS, TOKENS = 64, 12, 256
FREE = Quota(kv_blocks=BLOCKS, tokens_per_step=TOKENS, active_seqs=SEQS, gate_open=True)
# Prompts with a common beginning, which the prefix cache shares, and how many tokens are generated behind each.
PROMPTS = [[3 + (j if j < 33 else j * (i + 2)) % 90 for j in range(20 + 11 * i)] for i in range(8)]
LENGTHS = [15 + 17 * (i % 4) for i in range(8)]
EVENTS = {"arrive": 12, "quota": 6, "free": 4, "abort": 2, "pause": 1, "empty the cache": 1, "nothing": 74}
"""How often each, of a hundred."""

_STUCK_STEPS = 5_000


def force_asynchronous() -> None:
    """vLLM switches asynchronous scheduling off on CPU, where it is of no use and works all the same."""
    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    @wraps(check)
    def and_on_again(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(and_on_again)


class Bench:
    """The engine, its board, and what was seen to be wrong at each of its schedules."""

    def __init__(self, question: dict[str, Any], folder: Path) -> None:
        board = Path(question["board"])
        self.writer, self.reader = claim_quota(board), BoardReader(board)
        env = EngineEnv("guest", "00ff" * 4, 3, folder / "no.sock", folder / "page", board=board)
        os.environ.update({name: value for name, value in env.variables().items() if value is not None})
        if question["asynchronous"]:
            force_asynchronous()
        scheduler = f"rose_executor.quota_scheduler.Quota{'Async' if question['asynchronous'] else ''}Scheduler"
        self.engine: Any = LLM(
            model=question["model"],
            dtype="float32",
            max_model_len=256,
            max_num_seqs=SEQS,
            max_num_batched_tokens=TOKENS,
            block_size=32,
            num_gpu_blocks_override=BLOCKS + 1,
            kv_cache_memory_bytes=2**24,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            scheduling_policy="priority",
            scheduler_cls=scheduler,
        ).llm_engine
        self.core: Any = self.engine.engine_core.engine_core
        assert (self.core.batch_queue is not None) == question["asynchronous"]
        self.quota, self.schedules, self.written_s = FREE, 0, 0.0
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self.answers: dict[str, list[int]] = {}
        self.live: list[str] = []
        self.aborted: set[str] = set()
        self._schedule = self.core.scheduler.schedule
        self.core.scheduler.schedule = self._watched

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        self.schedules += 1
        state = self.state()
        tokens = self.quota.tokens_per_step if self.quota.gate_open else 0
        if state.quota_number == 0 and time.monotonic() - self.written_s > QUOTA.stale_after_s:
            # This process was kept waiting between the two, and the guest shut its gate by itself.
            tokens = 0
        elif state.quota_number != self.writer.number:
            self.wrong.append(f"schedule {self.schedules}: quota {self.writer.number} is not in force: {state}")
        elif state.kv_blocks_used > self.quota.kv_blocks or state.running > self.quota.active_seqs:
            self.wrong.append(f"schedule {self.schedules}: {state} under {self.quota}")
        if output.total_num_scheduled_tokens > tokens:
            self.wrong.append(f"schedule {self.schedules}: {output.total_num_scheduled_tokens} tokens, not {tokens}")
        if (
            self.quota == FREE
            and tokens
            and state.waiting
            and not state.running
            and not output.total_num_scheduled_tokens
        ):
            self.wrong.append(f"schedule {self.schedules}: nothing runs, and everything may: {state}")
        return output

    def step(self) -> None:
        # Renewed each time, as by an executor: nobody knows how long a step takes on a busy machine.
        self.written_s = time.monotonic()
        self.writer.write(self.quota)
        for output in self.engine.step():
            self.answers[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                self.live.remove(output.request_id)

    def add(self, name: str, priority: int) -> None:
        kind = int(name.partition("-")[0])
        sampling = SamplingParams(
            max_tokens=LENGTHS[kind], temperature=0.0, ignore_eos=True, logprobs=1, detokenize=False
        )
        self.engine.add_request(name, TokensPrompt(prompt_token_ids=PROMPTS[kind]), sampling, priority=priority)
        self.live.append(name)

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])
        self.live.remove(name)
        self.aborted.add(name)

    def to_the_end(self) -> None:
        for _ in range(_STUCK_STEPS):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"still not done: {self.state()}")

    def state(self) -> GuestState:
        """What the guest has said last."""
        state = self.reader.read(replace(GUEST, stale_after_s=math.inf), time.monotonic()).state
        assert state is not None
        return state

    def used_blocks(self) -> int:
        """By the pool's own count, without what a quota makes of it."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - type(pool).get_num_free_blocks(pool))


def drawn(seeded: random.Random) -> Quota:
    """Often room to work in, sometimes none at all."""
    return FREE._replace(
        kv_blocks=seeded.choice((0, 3, 8, 16, BLOCKS, BLOCKS)),
        tokens_per_step=seeded.choice((0, 1, 7, 40, TOKENS, TOKENS)),
        active_seqs=seeded.choice((0, 1, 3, SEQS, SEQS)),
        gate_open=seeded.random() < 0.95,
    )


def disturb(bench: Bench, seeded: random.Random, name: str) -> None:
    """What happens before one step: mostly nothing."""
    event = seeded.choices(tuple(EVENTS), tuple(EVENTS.values()))[0]
    if event == "arrive" and len(bench.live) < 2 * SEQS:
        bench.add(f"{seeded.randrange(len(PROMPTS))}-{name}", seeded.randrange(3))
    elif event == "quota":
        bench.quota = drawn(seeded)
    elif event == "free":
        bench.quota = FREE
    elif event == "abort" and bench.live:
        bench.abort(seeded.choice(bench.live))
    elif event in ("pause", "empty the cache"):
        pause(bench, emptied=event == "empty the cache")
    bench.done[event] += 1


def pause(bench: Bench, *, emptied: bool) -> None:
    """As between two versions: no step is under way, running requests stay, or all begin their context anew."""
    bench.core.pause_scheduler(mode="keep", clear_cache=False)
    for _ in range(4):
        bench.step()
    schedules = bench.schedules
    bench.step()
    if bench.core.batch_queue or bench.schedules != schedules:
        bench.wrong.append(f"schedule {schedules}: it goes on although it is paused")
    if emptied and not bench.core.reset_prefix_cache(reset_running_requests=True):
        bench.wrong.append(f"schedule {schedules}: the prefix cache could not be emptied")
    bench.core.resume_scheduler()


def outcome(bench: Bench, seed: int, steps: int, reference: list[list[int]]) -> dict[str, Any]:
    """One seed's run: what was wrong, and what happened in it."""
    seeded = random.Random(seed)
    for of_the_last in (bench.answers, bench.aborted, bench.done, bench.wrong):
        of_the_last.clear()
    preempted = bench.state().preemptions
    for number in range(steps):
        disturb(bench, seeded, f"{seed}-{number}")
        bench.step()
    bench.quota = FREE
    bench.to_the_end()
    for name, got in bench.answers.items():
        expected = reference[int(name.partition("-")[0])]
        if got != (expected[: len(got)] if name in bench.aborted else expected):
            bench.wrong.append(f"{name}: {got}, expected {expected}")
    return {
        "wrong": bench.wrong[:5],
        "used_blocks": bench.used_blocks(),
        "emptied": bench.core.reset_prefix_cache(),
        "lost": bench.live,
        "whole": len(bench.answers.keys() - bench.aborted),
        "cut_short": len(bench.answers.keys() & bench.aborted),
        "preempted": bench.state().preemptions - preempted,
        "never": sorted(EVENTS.keys() - bench.done.keys()),
    }


def main(question: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    bench = Bench(question, folder)
    for kind in range(len(PROMPTS)):
        bench.add(f"{kind}-reference", 0)
    bench.to_the_end()
    reference = [bench.answers[f"{kind}-reference"] for kind in range(len(PROMPTS))]
    return [outcome(bench, seed, question["steps"], reference) for seed in question["seeds"]]


if __name__ == "__main__":
    answer = Path(sys.argv[2])
    answer.write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_bytes()), answer.parent)))
