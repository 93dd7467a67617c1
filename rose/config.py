"""Job files: every key of a run, with its default, its bounds and one line on what it does.

Invariants
- This module is the only place that knows a job file's keys; docs/job-file.md and every error are made from it.
- A job is refused as a whole, with all of its problems named at once: file, key, value, what is allowed.
- Paths in a loaded `Job` are absolute: those in the file are relative to the file itself.
- Defaults are the recipe that was measured to learn on two CPU cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rose import engine_limits, keys, toml
from rose.engine_limits import Dtype
from rose.errors import ConfigError
from rose.keys import Section

PROBLEMS_SHOWN = 20
_INT_MAX = 2**31 - 1
_EXPECTED = "a job file in TOML"


_NAME_BYTES_MAX = 255
_PATH_BYTES_MAX = 4095


def _openable(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("no path holds a NUL")
    if any(len(os.fsencode(part)) > _NAME_BYTES_MAX for part in path.parts):
        raise ValueError(f"no part of a path is longer than {_NAME_BYTES_MAX} bytes")
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise ValueError(f"no path is longer than {_PATH_BYTES_MAX} bytes")
    return path


Seconds = Annotated[float, Field(gt=0, le=86_400)]
# Of a job's engine, and of an executor's guest.
ModelLen = Annotated[int, Field(ge=engine_limits.MODEL_LEN_MIN, le=engine_limits.MODEL_LEN_MAX)]
Seqs = Annotated[int, Field(ge=engine_limits.SEQS_MIN, le=engine_limits.SEQS_MAX)]
BlockTokens = Annotated[
    int,
    Field(
        ge=engine_limits.BLOCK_TOKENS_STEP,
        le=engine_limits.BLOCK_TOKENS_MAX,
        multiple_of=engine_limits.BLOCK_TOKENS_STEP,
    ),
]
KvCacheGib = Annotated[float, Field(ge=engine_limits.KV_CACHE_GIB_MIN, le=engine_limits.KV_CACHE_GIB_MAX)]
AnyPath = Annotated[Path, Field(strict=False), AfterValidator(_openable)]
CERTIFICATES: str = Field(
    default="",
    pattern=r"^[^\x00]{0,4095}$",
    description="Folder with ca.crt, tls.crt and tls.key, for TLS both ways beside the token; empty: the token alone.",
)
Param = bool | int | float | str


class RunConfig(Section):
    """The run itself."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,23}$", description="First part of the run's id.")
    seed: int = Field(default=0, ge=0, le=_INT_MAX, description="Seed of everything random in the run.")
    out: AnyPath = Field(default=Path("runs"), description="Folder that gets one output folder per run.")
    metrics_port: int = Field(
        default=0, ge=0, le=65_535, description="Loopback port of the run's own metrics; 0 takes any free one."
    )
    certificates: str = CERTIFICATES


class ModelConfig(Section):
    """The policy to train."""

    path: AnyPath = Field(description="Model folder in Hugging Face format (config, tokenizer, safetensors).")


class EngineConfig(Section):
    """The inference engine."""

    dtype: Dtype = Field(default="float32", description="Arithmetic of the engine; parity within 1e-4 needs float32.")
    max_model_len: ModelLen = Field(default=1024, description="Longest sequence, prompt and output, in tokens.")
    max_num_seqs: Seqs = Field(default=128, description="Most sequences decoded in one engine step.")
    block_size: BlockTokens = Field(
        default=32, description="Tokens in one KV block; small blocks share prefixes better."
    )
    kv_cache_gib: KvCacheGib = Field(default=1.0, description="Memory for the KV cache, in GiB.")
    stream_interval: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Tokens per streamed piece; a killed engine loses at most one piece a turn.",
    )
    port: int = Field(default=0, ge=0, le=65_535, description="Loopback port of the engine; 0 takes any free one.")
    start_timeout_s: Seconds = Field(
        default=180.0, description="Longest wait for an engine to become healthy, in seconds."
    )
    restarts_max: int = Field(default=3, ge=0, le=1000, description="Engine deaths that the run survives.")


class EnvironmentConfig(Section):
    """The task."""

    kind: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_]*)?$",
        description="The environment: a built-in name such as frozen_lake, or package.module:Class.",
    )
    workers: int = Field(
        default=1, ge=1, le=1024, description="Processes that play the episodes; one that dies is replaced."
    )
    params: dict[str, Param] = Field(default_factory=dict, description="Table of the environment's own settings.")
    reset_timeout_s: Seconds = Field(default=20.0, description="Longest wait for an episode to begin, in seconds.")
    step_timeout_s: Seconds = Field(default=20.0, description="Longest wait for the answer to one action, in seconds.")
    turns_max: int = Field(
        default=64,
        ge=1,
        le=10_000,
        description="Turns after which an episode is cut off, if it has not ended by itself.",
    )
    latency: Literal["none", "fast", "tool", "swe"] = Field(
        default="none",
        description="Latency added to every reset and step, as if the environment called tools: "
        "medians of 0.05 s (fast), 0.4 s (tool) and 1 s (swe) a step, with long tails.",
    )
    latency_scale: float = Field(default=1.0, gt=0, le=1000, description="Factor on every added latency.")


class RolloutConfig(Section):
    """How trajectories are sampled."""

    groups: int = Field(default=16, ge=1, le=65_536, description="Tasks per step.")
    group_size: int = Field(default=8, ge=2, le=4096, description="Attempts at each task, compared with each other.")
    temperature: float = Field(default=1.0, gt=0, le=2, description="Sampling temperature of training and evaluation.")
    max_new_tokens: int = Field(default=6, ge=1, le=1 << 20, description="Most tokens sampled in one turn.")
    turn_timeout_s: Seconds = Field(default=60.0, description="Longest wait for one turn of the engine, in seconds.")


class TrainConfig(Section):
    """The update."""

    steps: int = Field(
        default=40, ge=1, le=10_000_000, description="Steps: one rollout, one update, one new version each."
    )
    learning_rate: float = Field(default=2e-4, gt=0, le=1, description="AdamW learning rate after warm-up.")
    warmup_steps: int = Field(
        default=5,
        ge=0,
        le=1_000_000,
        description="Steps of linear warm-up; without it the format can collapse at once.",
    )
    clip_low: float = Field(default=0.2, ge=0, lt=1, description="The probability ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(
        default=0.28, ge=0, le=10, description="The probability ratio is clipped above 1 + clip_high."
    )
    minibatches: int = Field(default=2, ge=1, le=1024, description="Optimiser updates per step.")
    micro_batch_tokens: int = Field(
        default=4096, ge=64, le=1 << 24, description="Most padded tokens in one forward pass."
    )
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e6, description="Gradients are scaled down to this norm.")
    threads: int = Field(default=2, ge=1, le=1024, description="CPU threads of the actor, and of the reference.")
    start_timeout_s: Seconds = Field(
        default=300.0,
        description="Longest wait for Ray, actor, reference or an environment worker to start, in seconds.",
    )
    update_timeout_s: Seconds = Field(default=600.0, description="Longest wait for one update, in seconds.")


class EvaluationConfig(Section):
    """Held-out episodes."""

    episodes: int = Field(default=512, ge=1, le=1_000_000, description="Episodes of one evaluation.")
    first_seed: int = Field(
        default=1_000_000_000,
        ge=1,
        le=_INT_MAX,
        description="Seed of the first held-out task; training stays below it, with a task of its own for every group.",
    )
    every_steps: int = Field(
        default=0, ge=0, le=10_000_000, description="Steps between evaluations; 0: before and after only."
    )


class SchedulerSection(Section):
    """Which engine takes the next turn."""

    port: int = Field(
        default=0, ge=0, le=65_535, description="Loopback port of the run's scheduler; 0 takes any free one."
    )


class WeightsConfig(Section):
    """Published versions."""

    keep: int = Field(default=2, ge=1, le=1000, description="Published versions kept in the runtime folder.")
    port: int = Field(
        default=0,
        ge=0,
        le=65_535,
        description="Loopback port where executors that lend engines fetch them; 0 takes any free one.",
    )
    parity_every_steps: int = Field(
        default=1, ge=0, le=10_000_000, description="Steps between comparisons with a fresh engine; 0: never."
    )
    parity_tolerance: float = Field(
        default=1e-4, gt=0, le=100, description="Largest log-prob difference allowed between live and fresh engine."
    )


class AlarmConfig(Section):
    """What stops a run that has gone wrong."""

    malformed_max: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of malformed actions that raises the alarm, once a version has been below it: "
        "a policy that never had the format raises none.",
    )


class Job(Section):
    """A whole job file."""

    run: RunConfig
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    environment: EnvironmentConfig
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    scheduler: SchedulerSection = SchedulerSection()
    weights: WeightsConfig = WeightsConfig()
    alarm: AlarmConfig = AlarmConfig()

    @model_validator(mode="after")
    def _keys_agree(self) -> Job:
        trajectories = self.rollout.groups * self.rollout.group_size
        rules = {
            "rollout.max_new_tokens": (self.rollout.max_new_tokens, self.engine.max_model_len - 1),
            "train.minibatches": (self.train.minibatches, trajectories),
            "evaluation.first_seed": (self.evaluation.first_seed, _INT_MAX + 1 - self.evaluation.episodes),
        }
        lines = [f"{key} = {value}: allowed is at most {most}" for key, (value, most) in rules.items() if value > most]
        tasks, first_seed = self.train.steps * self.rollout.groups, self.evaluation.first_seed
        if first_seed < tasks:
            lines.append(
                f"evaluation.first_seed = {first_seed}: allowed is at least {tasks}, which is train.steps x"
                " rollout.groups: training takes its seeds modulo first_seed, and would see tasks again"
            )
        lines += keys.ports_taken_twice(
            {
                "engine.port": self.engine.port,
                "run.metrics_port": self.run.metrics_port,
                "scheduler.port": self.scheduler.port,
                "weights.port": self.weights.port,
            }
        )
        if lines:
            raise PydanticCustomError(keys.DISAGREE, "keys disagree", {"lines": lines})
        return self

    def to_toml(self) -> str:
        """The job with every default filled in; `load_job` reads it back to an equal job."""
        return toml.dumps(self.model_dump())


def load_job(path: Path, *, out: Path | None = None) -> Job:
    """Read, check and resolve a job file; `out` replaces `run.out` and is relative to the working directory.

    Raises ConfigError that names the file and, for every wrong key at once, its value and what is allowed; of very
    many the first `PROBLEMS_SHOWN`.
    """
    table = toml.read(path, _EXPECTED)
    try:
        job = Job.model_validate(table)
    except ValidationError as error:
        problems = keys.problems(Job, error)
        what = f"{path}: " + (problems[0] if len(problems) == 1 else f"{len(problems)} problems")
        if len(problems) > 1:
            what += "".join(f"\n  {problem}" for problem in problems[:PROBLEMS_SHOWN])
        if len(problems) > PROBLEMS_SHOWN:
            what += f"\n  and {len(problems) - PROBLEMS_SHOWN} more"
        raise ConfigError(what, to_do="mend the file; `rose job-file` lists every key") from None
    base = path.absolute().parent
    chosen = _absolute("--out", Path.cwd(), out) if out else _absolute("run.out", base, job.run.out)
    certificates = job.run.certificates and str(_absolute("run.certificates", base, Path(job.run.certificates)))
    run = job.run.model_copy(update={"out": chosen, "certificates": certificates})
    model = job.model.model_copy(update={"path": _absolute("model.path", base, job.model.path)})
    return job.model_copy(update={"run": run, "model": model})


def _absolute(key: str, base: Path, path: Path) -> Path:
    try:
        return _openable(Path(os.path.abspath(base / os.path.expanduser(path))))
    except ValueError as error:
        raise ConfigError(f"{key} = {str(path)[:80]!r}...: {error}", to_do="choose a shorter path") from None
