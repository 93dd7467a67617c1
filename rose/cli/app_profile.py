"""What `rose profile` takes. Like `app`, it imports nothing before the command is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rose.cli.app_options import JsonOption
from rose.engine_limits import (
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_STEP,
    KV_CACHE_GIB_MAX,
    KV_CACHE_GIB_MIN,
    MODEL_LEN_MAX,
    MODEL_LEN_MIN,
    SEQS_MAX,
    SEQS_MIN,
)

HELP = """Measure what an engine's steps cost here.

It starts an engine as the executor starts a guest, asks it for batches and prompts of many sizes, and learns from
each step what tokens, sequences and context cost. The profile is kept by model, device and settings, where an
executor finds it and goes on learning. Nothing else should run meanwhile: what slows the engine down is measured
too. Some 20 seconds for a small model on CPU, 15 of them the start of vLLM; with large ones the start, and then
--seconds.

\b
Examples:
  rose profile models/guest
  rose profile models/guest --dtype bfloat16 --max-model-len 8192 --seconds 300
  rose profile models/served --serving --json
"""


def profile(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder, of the guest or of serving.")],
    serving: Annotated[
        bool, typer.Option("--serving", help="As a serving engine has it: on CPU, weights packed as vLLM likes them.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="N", min=1.0, max=3600.0, help="Longest time for the steps.")
    ] = 60.0,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="float32 or bfloat16.")] = "float32",
    max_model_len: Annotated[
        int,
        typer.Option(
            "--max-model-len", metavar="N", min=MODEL_LEN_MIN, max=MODEL_LEN_MAX, help="Longest sequence, in tokens."
        ),
    ] = 1024,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", metavar="N", min=SEQS_MIN, max=SEQS_MAX, help="Most sequences in a step.")
    ] = 128,
    block_size: Annotated[
        int,
        typer.Option(
            "--block-size", metavar="N", min=BLOCK_TOKENS_STEP, max=BLOCK_TOKENS_MAX, help="Tokens in one KV block."
        ),
    ] = 32,
    kv_cache_gib: Annotated[
        float,
        typer.Option(
            "--kv-cache-gib",
            metavar="N",
            min=KV_CACHE_GIB_MIN,
            max=KV_CACHE_GIB_MAX,
            help="Memory of the KV cache, in GiB.",
        ),
    ] = 0.5,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**32, help="Of what it is asked.")] = 0,
    start_timeout: Annotated[
        float, typer.Option("--start-timeout", metavar="N", min=1.0, max=3600.0, help="Longest start, in seconds.")
    ] = 600.0,
    store: Annotated[
        Path | None, typer.Option("--store", metavar="DIR", help="Folder of profiles; ~/.local/state/rose/profiles.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder that gets one output folder: logs, and all steps.")
    ] = Path("runs"),
    json: JsonOption = False,
) -> None:
    from rose.cli.profile import profile_command

    profile_command(
        model,
        serving=serving,
        seconds=seconds,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        kv_cache_gib=kv_cache_gib,
        seed=seed,
        start_timeout_s=start_timeout,
        store=store,
        out=out,
        as_json=json,
    )
