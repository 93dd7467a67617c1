"""Does a live engine compute what a fresh one would? Fixed prefixes, scored by both, compared.

Invariants
- The fresh side shares nothing with the live one: another process, weights read from the snapshot folder.
- A fresh engine that is lost (killed from outside, or refused by the machine) is started again, a few times.
- Both sides score with the same request (one greedy token and the log-probs of the most likely ones), so a
  difference is a difference of weights or of stale state.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ClusterError, ContractError, EngineError, RoseError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.child_log import ChildLog
from rose_executor.launcher import Child, Command, Launcher
from rose_executor.token_route import TokenRoute

log = logger("fresh probe")

TOP_LOGPROBS = 20
# Ties at the edge of the list may fall to either side; more than this is another distribution.
_COMMON_MIN = 0.8
_AGAIN_AFTER_S = (0.5, 2.0)
"""Delays between three attempts: what was short of memory may have some again."""


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """Per prefix, the log-probs of the most likely next tokens, by id; all made under one weight version."""

    scores: tuple[Mapping[int, float], ...]


async def probe_live(route: TokenRoute, prefixes: Sequence[Sequence[int]], *, request_prefix: str) -> ProbeScores:
    """Score with a live engine; `request_prefix` makes the request ids, one token is generated for each.

    Raises EngineError as the route does.
    """
    outputs = await asyncio.gather(
        *(
            route.generate(
                f"{request_prefix}-{index}",
                prefix,
                max_tokens=1,
                temperature=0.0,
                stop_token_ids=(),
                top_logprobs=TOP_LOGPROBS,
            )
            for index, prefix in enumerate(prefixes)
        )
    )
    return ProbeScores(tuple(output.top[0] for output in outputs))


async def probe_fresh(
    launcher: Launcher,
    snapshot_dir: Path,
    prefixes: Sequence[Sequence[int]],
    *,
    work_dir: Path,
    log_path: Path,
    waits: WaitBoard,
    dtype: str = "float32",
    max_model_len: int = 1024,
    kv_cache_bytes: int = 32 * 2**20,
    timeout_s: float = 120.0,
) -> ProbeScores:
    """Score with an engine made for this alone from `snapshot_dir`; it is gone afterwards.

    `work_dir` holds the question and the answer while it lasts. Raises EngineError with the log's last lines
    if the engine fails by itself twice in a row or is lost three times, ClusterError if the machine refuses to start
    it three times, DeadlineExceeded if an attempt takes longer than `timeout_s`.
    """
    question = work_dir / f"probe-{snapshot_dir.name}.json"
    answer = question.with_suffix(".answer.json")
    question.write_text(
        json.dumps(
            {
                "model_dir": str(snapshot_dir),
                "prefixes": [list(prefix) for prefix in prefixes],
                "top_logprobs": TOP_LOGPROBS,
                "dtype": dtype,
                "max_model_len": max_model_len,
                "kv_cache_bytes": kv_cache_bytes,
            }
        )
    )
    command = Command(
        "rose_executor.fresh_probe_main",
        (str(question), str(answer)),
        log_path,
        work_dir,
        {"VLLM_CPU_KVCACHE_SPACE": None, "TMPDIR": str(work_dir)},
    )
    try:
        await _until_scored(launcher, command, f"the fresh engine for {snapshot_dir}", waits, timeout_s)
        scores = json.loads(answer.read_bytes())
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    return ProbeScores(tuple({int(token): value for token, value in probe.items()} for probe in scores))


def compare(live: ProbeScores, fresh: ProbeScores) -> float:
    """Largest absolute difference of log-probs over the ids that both sides name.

    Raises ContractError if the two were not asked the same, or name mostly different ids.
    """
    if len(live.scores) != len(fresh.scores):
        raise ContractError(f"{len(live.scores)} live probes against {len(fresh.scores)} fresh ones")
    largest = 0.0
    for index, (ours, theirs) in enumerate(zip(live.scores, fresh.scores, strict=True)):
        common = ours.keys() & theirs.keys()
        if len(common) < _COMMON_MIN * max(len(ours), len(theirs), 1):
            raise ContractError(
                f"probe {index}: live and fresh engine name {len(common)} of {len(ours)} likely tokens in common",
                expected="the same weights on both sides",
            )
        for token in common:
            difference = abs(ours[token] - theirs[token])
            if not difference <= largest:  # also true of one that is not a number, which nothing exceeds
                largest = math.inf if math.isnan(difference) else difference
    return largest


async def _until_scored(launcher: Launcher, command: Command, whose: str, waits: WaitBoard, timeout_s: float) -> None:
    last_code = 0
    for delay_s in (*_AGAIN_AFTER_S, None):
        written = ChildLog(command.log_path)
        failure: RoseError
        try:
            child = await launcher.launch(command)
            code = await _ended(child, waits, timeout_s)
        except ClusterError as refused:
            code, failure = 0, refused
        else:
            if code == 0:
                return
            failure = EngineError(f"{whose} {child.death()}{written.last_words()}", to_do=f"see {command.log_path}")
        if delay_s is None or (code > 0 and last_code > 0):
            raise failure
        last_code = code
        log.warning("the fresh engine is started again", why=failure.what)
        with waits.waiting("another attempt", "fresh engine", delay_s):
            await asyncio.sleep(delay_s)


async def _ended(child: Child, waits: WaitBoard, timeout_s: float) -> int:
    try:
        return await waits.within(child.wait(), "fresh probe", "fresh engine", timeout_s, boundary="engine")
    finally:
        child.signal(signal.SIGKILL)
