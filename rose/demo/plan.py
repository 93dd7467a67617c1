"""What the demo is made of, and whether it can be had here.

Invariants
- Whatever is wrong with trace, job or machine is said before anything starts.
- What runs with the guest and without it differs in the guest alone.
- The pace of the load is chosen before anything is compared, once, and is the same alone and shared; never above what
  the plan asks for, since a fast machine has more to lend, not more to serve.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from rose.config import Job, load_job
from rose.demo.load import LoadPlan
from rose.demo.serving_model import ServingShape
from rose.machine import Machine
from rose.model_folder.folder import read_model_folder
from rose.preflight import Check, memory_needed_bytes
from rose.workload.scaling import Scaling, scaled
from rose.workload.shipped_traces import named_trace
from rose.workload.trace import Trace

_GIB = 1 << 30
SERVING_BYTES = int(1.6 * _GIB)
GUEST_BYTES = int(1.6 * _GIB)
TRACE = "azure_2023_conv"
PART = Scaling(window_s=60.0, rate_rps=2.0, keep_s=60.0, prompt_scale=1 / 16, output_scale=1 / 8, context_tokens=1024)
"""One minute that keeps its bursts. Its rate is that of a fast machine; see `DemoPlan.share`."""
SHARE = 0.4
"""Of its core that serving takes at most: what it does not need is what this is about."""
TOKEN_IDS = "5:384"
"""All of the vocabulary but its special tokens."""


@dataclass(frozen=True, slots=True)
class GuestPlan:
    """The guest beside the serving engine; the job says what else it is."""

    max_num_seqs: int = 96
    kv_cache_gib: float = 0.5
    restarts_max: int = 10


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """All of it. Without a `guest` the same run shares nothing, for comparison.

    `share`: the load is slowed down until serving alone takes no more than this of its core.
    `yields`: everything beside the load client gives way to it. Not where other work would then starve it for good.
    """

    job: Path
    out: Path
    load: LoadPlan
    shape: ServingShape = field(default_factory=ServingShape)
    guest: GuestPlan | None = field(default_factory=GuestPlan)
    share: float = SHARE
    yields: bool = True
    plain: bool = False


def shipped_plan(out: Path, *, trace: str = TRACE, plain: bool = False) -> DemoPlan:
    """The plan of `rose demo`."""
    job = Path(str(files("rose.demo") / "job.toml"))
    return DemoPlan(job, out, LoadPlan(trace, PART, TOKEN_IDS), plain=plain)


def planned_load(load: LoadPlan) -> Trace:
    """The part that is replayed. Raises ConfigError if there is no such trace, or it is none."""
    return scaled(named_trace(load.trace), load.scaling)


def paced(scaling: Scaling, request_s: float, share: float) -> Scaling:
    """The scaling at a rate that makes requests of `request_s` each take `share` of the time, or at its own.

    Requests that are served together cost less than one after the other, so what they take in the end is less.
    """
    assert scaling.rate_rps is not None
    return replace(scaling, rate_rps=round(min(scaling.rate_rps, share / request_s), 3))


def planned_job(plan: DemoPlan) -> Job:
    """Raises ConfigError for a wrong job file."""
    return load_job(plan.job, out=plan.out)


def demo_checks(plan: DemoPlan, job: Job, machine: Machine) -> list[Check]:
    """What the demo needs of a machine beyond what its job does."""
    needed = memory_needed_bytes(job, read_model_folder(job.model.path)) + SERVING_BYTES
    needed += GUEST_BYTES if plan.guest is not None else 0
    found = machine.memory_available_bytes
    return [
        Check(
            "memory of all engines",
            found >= needed,
            f"{found / _GIB:.1f} GiB available",
            f"{needed / _GIB:.1f} GiB for the run, a serving engine and a guest",
            "" if found >= needed else "end other programs, or train alone: rose run JOB.toml",
        ),
        Check(
            "two cores",
            machine.cores_usable >= 2,
            f"{machine.cores_usable:g} usable of {machine.cores}",
            "2: one that serves, one that trains",
            "" if machine.cores_usable >= 2 else "use a machine with two, or train alone: rose run JOB.toml",
        ),
    ]
