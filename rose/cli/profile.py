"""`rose profile`: how far it is while it goes, and what was found, for people or for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rose.cli.terminal import console
from rose.engine_limits import BLOCK_TOKENS_STEP, Dtype
from rose.errors import ConfigError
from rose_executor.profile_program import Profiled, ProfileJob, run_profile
from rose_executor.profile_run import Progress
from rose_executor.profile_store import default_folder
from rose_executor.step_shape import StepShape

_PLAIN_LINES = 4
_UPPER_ERROR_QUIET = 0.35
"""On machines that did nothing else, nine in ten steps of the models that were recorded missed by less."""


def profile_command(
    model: Path, *, dtype: str, block_size: int, store: Path | None, as_json: bool, **rest: Any
) -> None:
    """Profile a model and print what was found. Raises as `run_profile`, ConfigError for a wrong flag."""
    if dtype not in get_args(Dtype):
        raise ConfigError(f"--dtype {dtype}", expected=" or ".join(get_args(Dtype)))
    if block_size % BLOCK_TOKENS_STEP:
        raise ConfigError(f"--block-size {block_size}", expected=f"a multiple of {BLOCK_TOKENS_STEP}")
    folder = default_folder() if store is None else store
    job = ProfileJob(model=model, dtype=dtype, block_size=block_size, store=folder.absolute(), **rest)
    with _progress() as progress:
        found = run_profile(job, progress.starts, progress.told)
    if as_json:
        typer.echo(json.dumps(as_data(found), indent=2))
    else:
        console().print(render(found, job))


class _Progress:
    """One line that is drawn over on a terminal; elsewhere a few lines in all. On stderr, apart from what was found."""

    def __init__(self, live: Live | None) -> None:
        self._live = live
        self._said = -1

    def starts(self) -> None:
        self._say("starting vLLM ...")

    def told(self, progress: Progress) -> None:
        done, planned = progress.done, progress.planned
        line = f"{done} of {planned} loads, at most {max(0.0, progress.left_s):.0f} s more"
        if self._live is not None or done * _PLAIN_LINES // planned != self._said:
            self._said = done * _PLAIN_LINES // planned
            self._say(line)

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(line))
        else:
            typer.echo(line, err=True)


@contextmanager
def _progress() -> Iterator[_Progress]:
    if not sys.stderr.isatty():
        yield _Progress(None)
        return
    with Live(console=Console(stderr=True), transient=True) as live:
        yield _Progress(live)


def as_data(found: Profiled) -> dict[str, Any]:
    """All of it for programs; seconds, and relative errors."""
    state = found.profile.state()
    assert state is not None
    fixed, per_token, per_seq, per_context = state.parts
    return {
        **asdict(found.key),
        "file": str(found.file),
        "output": str(found.output),
        "took_s": round(found.took_s, 1),
        "steps": len(found.steps),
        "fixed_s": fixed,
        "per_token_s": per_token,
        "per_seq_s": per_seq,
        "per_context_token_s": per_context,
        "held_out": asdict(found.error),
        "examples": {name: found.profile.seconds(shape) for name, shape in _examples(found)},
    }


def render(found: Profiled, job: ProfileJob) -> RenderableType:
    """What a step costs in words, examples, how well that tells, and where it is kept."""
    state = found.profile.state()
    assert state is not None
    fixed, per_token, per_seq, per_context = state.parts
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("a step")
    table.add_column("takes", justify="right")
    for name, shape in _examples(found):
        table.add_row(name, _time(found.profile.seconds(shape)))
    error = found.error
    busy = "That is a lot. Was the machine busy? Run it again when nothing else runs."
    return Group(
        Text(f"{job.model} on {found.key.device}, {found.key.vllm}: {len(found.steps)} steps in {found.took_s:.0f} s"),
        Text(
            f"A step takes {_time(fixed)}, and {_time(1000 * per_token)} more for 1000 tokens, {_time(per_seq)} for a"
            f" sequence, {_time(1000 * per_context)} for 1000 tokens of context."
        ),
        Text(),
        table,
        Text(),
        Text(
            f"Steps held out of it took what it says within {error.median:.0%} (half of them) or {error.upper:.0%} "
            f"(nine in ten); one in a hundred took more than {error.slower:.1f} times that."
        ),
        *([Text(busy, "yellow")] if error.upper > _UPPER_ERROR_QUIET else []),
        Text(f"kept as {found.file}"),
    )


def _examples(found: Profiled) -> list[tuple[str, StepShape]]:
    """Shapes that were seen, from the smallest to the largest."""
    seqs = max(step.shape.seqs for step in found.steps)
    tokens = max(step.shape.tokens for step in found.steps)
    behind = max(step.shape.context_tokens // step.shape.seqs for step in found.steps if step.shape.seqs == seqs)
    return [
        ("1 sequence, its first tokens", StepShape(1)),
        (f"{seqs} sequences, {behind} tokens behind each", StepShape(seqs, seqs, seqs * behind)),
        ("256 tokens of a prompt", StepShape(256)),
        (f"{tokens} tokens of a prompt", StepShape(tokens)),
    ]


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
