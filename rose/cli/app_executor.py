"""What `rose executor` takes, and its help. Like `app`, it imports nothing before the command is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Lend what a serving engine leaves idle to a run.

It keeps a guest engine below the serving vLLM, brings it the weights of the run, and offers it to the run's
scheduler while serving has slack within its SLO. The serving vLLM needs rose-rl installed beside it, and
ROSE_SERVING_BOARD=/path/of/board in its environment; without either its metrics page can be scraped, and reaction is
coarser. SIGTERM ends it, and the guest with it; serving is never touched.

\b
The file, with its defaults:
  [executor]
  name = "executor"       # another one for each that joins the same run
  out = "runs"
  port = 0
  metrics_port = 0
  state = "state"         # no default: what outlives it, such as counted tokens
  cores = []              # of the guest; none named: all
  profiles = ""           # a folder; else where `rose profile` keeps what it found
  certificates = ""       # a folder with ca.crt, tls.crt and tls.key: TLS both ways
  [join]                  # what --join brings: a run's lend.toml
  scheduler = "127.0.0.1:7080"
  weights = "127.0.0.1:7070"
  token_file = "token"
  [serving]
  board = "/dev/shm/board"
  metrics = ""            # http://HOST:PORT/metrics of a vLLM that was not started with that
  ttft_ms = 500.0         # the SLO; no defaults
  tpot_ms = 60.0
  [guest]
  model = "model"         # no default: the base model of the run
  dtype = "float32"
  max_model_len = 1024
  max_num_seqs = 128
  block_size = 32
  kv_cache_gib = 1.0
  stream_interval = 1
  port = 0
  move_after_s = 2.0
  restarts_max = 3
  start_timeout_s = 600.0
  [partition]
  guest_share = 1.0       # of the GPU's threads (MPS), or of its cores; 1: no ceiling
  guest_memory_gib = 0.0  # of each GPU (MPS); 0: no limit
  [memory]                # for the keys and values of both engines
  pool_gib = 0.0          # 0: a fixed split, each keeps its whole cache
  serving_gib = 0.0       # the whole cache of the serving engine
  headroom = 0.2
  watermark = 0.5
  freeze_s = 30.0
  keep_free_gib = 0.0     # of the host: for less a guest is put to sleep, and ended

\b
Examples:
  rose executor --config executor.toml --join RUNTIME/lend.toml
  rose executor --config executor.toml
"""


def executor(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file; flags come before its keys.")
    ] = None,
    join: Annotated[
        Path | None, typer.Option("--join", metavar="FILE", help="lend.toml of the run, in place of [join].")
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help="Folder of its own for what outlives it.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="Loopback port of the counts; 0 takes any free one.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", metavar="N", help="Loopback port of its metrics; 0 takes any.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="First part of its id, and the id of its guest.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder that gets one output folder, with the logs.")
    ] = None,
) -> None:
    from rose.cli.executor import executor_command

    flags = {"state": state, "port": port, "metrics_port": metrics_port, "name": name, "out": out}
    executor_command(config, join, flags)
