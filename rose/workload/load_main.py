"""`python -m rose.workload.load_main`: replay a trace against a serving engine, in a process of its own.

It ends with status 0 when the replay is over or SIGTERM ended it, whatever the engine answered: that is what the file
of records is for. It ends with 1 if records were lost or the engine was not there, with 2 if it was asked for nonsense,
with 130 after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rose.errors import ConfigError, RoseError
from rose.metrics import LoadMetrics, MetricsServer, serve
from rose.processes import INTERRUPTED_STATUS
from rose.waits import WaitBoard
from rose.workload.latencies import LatencySummary, Percentiles, summarised
from rose.workload.load_client import LoadClient, LoadSettings
from rose.workload.load_record import LoadRecord, Outcome
from rose.workload.prompts import Prompts
from rose.workload.record_file import RecordWriter
from rose.workload.scaling import Scaling, scaled
from rose.workload.served_model import ServedModel, served_model
from rose.workload.shipped_traces import ATTRIBUTIONS, named_trace
from rose.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The command line, checked; see `--help`."""

    url: str
    trace: Trace
    records: Path
    model: str | None
    prefix: str
    prompt_ids: range
    in_flight_max: int
    deadline_s: float
    ready_timeout_s: float
    metrics_port: int
    prompt_seed: int


def main(
    url: Annotated[str, typer.Option(help="The engine's base address, such as http://127.0.0.1:8000.")],
    records: Annotated[Path, typer.Option(help="The file to write, one JSON line a request; must not exist.")],
    trace: Annotated[str, typer.Option(help=f"A trace file, or one of {', '.join(ATTRIBUTIONS)}.")],
    model: Annotated[str | None, typer.Option(help="The engine's name for its model; else the first.")] = None,
    window_s: Annotated[float | None, typer.Option(help="Take so many seconds of the trace.")] = None,
    start_s: Annotated[float | None, typer.Option(help="From here on; else the busiest.")] = None,
    rate_rps: Annotated[float | None, typer.Option(help="Stretch time to this mean rate.")] = None,
    keep_s: Annotated[float | None, typer.Option(help="End after so many seconds of replay.")] = None,
    prompt_scale: Annotated[float, typer.Option(help="Make prompts longer or shorter.")] = 1.0,
    output_scale: Annotated[float, typer.Option(help="Make answers longer or shorter.")] = 1.0,
    context: Annotated[int | None, typer.Option(help="Shorten to so many tokens; else as the engine needs.")] = None,
    spread_s: Annotated[float | None, typer.Option(help="Spread what arrives at one moment.")] = None,
    token_ids: Annotated[str, typer.Option(help="Make prompts of these ids, LOW:HIGH, without HIGH.")] = "100:1000",
    in_flight_max: Annotated[int, typer.Option(min=1, help="Refuse what is due beyond so many.")] = 256,
    deadline_s: Annotated[float, typer.Option(min=0.001, help="Give up a request after so long.")] = 120.0,
    ready_timeout_s: Annotated[float, typer.Option(min=0.001, help="Wait so long for the engine.")] = 60.0,
    metrics_port: Annotated[int, typer.Option(help="Serve /metrics here; 0 takes any free port.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and of spreading.")] = 0,
    replay_number: Annotated[int, typer.Option(min=0, help="Other prompts than in the replay of another number.")] = 0,
) -> None:
    """Replay a trace against an engine as its users would, and record what they see."""
    scaling = Scaling(spread_s, window_s, start_s, rate_rps, keep_s, prompt_scale, output_scale, context, seed)
    try:
        options = LoadOptions(
            url=url.rstrip("/"),
            trace=scaled(named_trace(trace), scaling),
            records=records,
            model=model,
            prefix=f"load-{secrets.token_hex(4)}",
            prompt_ids=_prompt_ids(token_ids),
            in_flight_max=in_flight_max,
            deadline_s=deadline_s,
            ready_timeout_s=ready_timeout_s,
            metrics_port=metrics_port,
            prompt_seed=seed + replay_number,
        )
        status = asyncio.run(replay(options))
    except RoseError as error:
        typer.echo(str(error), err=True)
        status = 2 if isinstance(error, ConfigError) else 1
    raise typer.Exit(status)


async def replay(options: LoadOptions) -> int:
    """The exit status. Raises RoseError if it cannot begin."""
    waits = WaitBoard()
    model = await served_model(options.url, options.ready_timeout_s, waits)
    trace = _fitted(options.trace, model)
    metrics = LoadMetrics()
    server = serve(options.metrics_port, metrics.registry)
    try:
        writer = RecordWriter(options.records, _head(options, trace, model, server))
        seen: list[LoadRecord] = []

        def record(one: LoadRecord) -> None:
            writer.add(one)
            seen.append(replace(one, gaps_s=()))
            _show(metrics, one)

        def beat(lag_s: float) -> None:
            metrics.loop_lag_seconds.observe(lag_s)
            metrics.in_flight.set(client.in_flight)
            metrics.records_lost.set(writer.lost)
            metrics.open_waits.set(len(waits.snapshot()))

        settings = LoadSettings(
            options.url, options.model or model.name, options.prefix, options.in_flight_max, options.deadline_s
        )
        prompts = Prompts(trace, options.prompt_ids.start, options.prompt_ids.stop, options.prompt_seed)
        client = LoadClient(settings, trace, prompts, record=record, beat=beat, waits=waits)
        typer.echo("\n".join((f"{trace.name}: {trace.attribution}", *trace.history, f"metrics at {server.url}")))
        signum = None
        try:
            signum = await _until_over(client)
        finally:
            # Without a signal's number, not even 0, the replay itself failed.
            ended = {"signal": signum, **asdict(client.counts), "lost": writer.lost}
            writer.close({**ended, "began_monotonic_s": client.began_at_s})
        for line in _words(summarised(seen), client, writer):
            typer.echo(line)
        if signum == signal.SIGINT:
            return INTERRUPTED_STATUS
        return 1 if writer.lost else 0
    finally:
        server.close()


async def _until_over(client: LoadClient) -> int:
    """Run to the end; the signal that ended it, or 0."""
    asked: list[int] = []
    stops: list[asyncio.Task[None]] = []

    def ask(signum: int) -> None:
        asked.append(signum)
        stops.append(asyncio.ensure_future(client.stop()))

    # The trace is there to stay: searching it for garbage would stop the measurement now and then.
    gc.collect()
    gc.freeze()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ask, signum)
    await client.run()
    await asyncio.gather(*stops)
    return asked[0] if asked else 0


def _fitted(trace: Trace, model: ServedModel) -> Trace:
    if model.context_tokens is None:
        return trace
    longest = max(request.prompt_tokens + request.output_tokens for request in trace.requests)
    if longest <= model.context_tokens:
        return trace
    return scaled(trace, Scaling(context_tokens=model.context_tokens))


def _prompt_ids(text: str) -> range:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise ConfigError(f"token ids {text!r}", expected="LOW:HIGH, such as 100:1000")
    return range(int(low), int(high))


def _head(options: LoadOptions, trace: Trace, model: ServedModel, server: MetricsServer) -> dict[str, Any]:
    return {
        "began_at": time.time(),
        "pid": os.getpid(),
        "url": options.url,
        "model": options.model or model.name,
        "request_prefix": options.prefix,
        "metrics_url": server.url,
        "trace": trace.name,
        "attribution": trace.attribution,
        "history": list(trace.history),
        "requests": len(trace.requests),
        "length_s": trace.length_s,
        "in_flight_max": options.in_flight_max,
        "deadline_s": options.deadline_s,
        "prompt_seed": options.prompt_seed,
    }


def _show(metrics: LoadMetrics, record: LoadRecord) -> None:
    metrics.requests.labels(outcome=record.outcome).inc()
    metrics.tokens.inc(record.tokens)
    if record.lag_s is not None:
        metrics.lag_seconds.observe(record.lag_s)
    if record.outcome is not Outcome.COMPLETED:
        return
    if record.ttft_s is not None:
        metrics.ttft_seconds.observe(record.ttft_s)
    if record.tpot_s is not None:
        metrics.tpot_seconds.observe(record.tpot_s)
    for gap_s in record.gaps_s:
        metrics.gap_seconds.observe(gap_s)


def _words(summary: LatencySummary, client: LoadClient, writer: RecordWriter) -> Sequence[str]:
    counts = client.counts
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(summary.outcomes.items()))
    lines = [
        f"{summary.requests} requests: {outcomes or 'none'}; {counts.unsent} not sent; {summary.tokens} tokens",
        f"TTFT {_milliseconds(summary.ttft)}; TPOT {_milliseconds(summary.tpot)}",
        f"client lag {_milliseconds(summary.lag)}; {counts.late} late by the client's own fault",
    ]
    if writer.lost:
        lines.append(f"{writer.lost} records lost: {writer.failure or 'the disk was too slow'}")
    return lines


def _milliseconds(found: Percentiles | None) -> str:
    if found is None:
        return "unknown"
    return f"p50 {1e3 * found.p50:.1f}, p95 {1e3 * found.p95:.1f}, p99 {1e3 * found.p99:.1f} ms"


if __name__ == "__main__":
    typer.run(main)
