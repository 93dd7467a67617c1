"""What the executor of the demo is started with."""

from __future__ import annotations

from pathlib import Path

from rose import toml
from rose.config import Job
from rose.demo.child import Program
from rose.demo.plan import GuestPlan
from rose.demo.serving_engine import free_port
from rose.runs import Run
from rose.slo import Slo


def executor_program(service: Run, guest: GuestPlan, job: Job, slo: Slo, cores: frozenset[int], lend: Path) -> Program:
    """Writes its configuration beside the director's log, with the run's file of who lends to whom.

    Its port is one for all its starts: the run asks there for the tokens of a guest that is long dead.
    """
    tables = {
        "executor": {
            "name": "executor",
            "out": str(job.run.out),
            "port": free_port(),
            "metrics_port": 0,
            "state": str(service.runtime / "guest"),
            "cores": sorted(cores),
        },
        "serving": {
            "board": str(service.runtime / "board"),
            "ttft_ms": 1e3 * slo.ttft_s,
            "tpot_ms": 1e3 * slo.tpot_s,
        },
        "guest": {
            "model": str(job.model.path),
            "dtype": job.engine.dtype,
            "max_model_len": job.engine.max_model_len,
            "max_num_seqs": guest.max_num_seqs,
            "block_size": job.engine.block_size,
            "kv_cache_gib": guest.kv_cache_gib,
            "stream_interval": job.engine.stream_interval,
            "restarts_max": guest.restarts_max,
        },
    }
    path = service.output / "executor.toml"
    path.write_text(toml.dumps(tables), encoding="utf-8")
    arguments = ("executor", "--config", str(path), "--join", str(lend))
    return Program("executor", "rose.cli.main", arguments, service.output / "executor.log")
