"""What an executor is started with: every key of its files, with default, bounds and one line on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rose import keys, toml
from rose.address import checked_url, host_and_port
from rose.config import CERTIFICATES, AnyPath, BlockTokens, EngineConfig, KvCacheGib, ModelLen, Seconds, Seqs
from rose.engine_limits import Dtype
from rose.errors import ConfigError
from rose.keys import Section
from rose.slo import Slo
from rose_executor.partition_terms import GuestLimits

_ENGINE = EngineConfig()


def _dialable(check: Callable[[str], object]) -> AfterValidator:
    """A rule of a key: what `check` refuses with ConfigError cannot be it."""

    def rule(given: str) -> str:
        try:
            check(given)
        except ConfigError as error:
            raise ValueError(f"allowed is {error.expected}") from None
        return given

    return AfterValidator(rule)


_Address = Annotated[str, _dialable(host_and_port)]
_UrlOrNone = Annotated[str, _dialable(lambda given: given and checked_url(given))]


class ProcessConfig(Section):
    """The process."""

    name: str = Field(
        default="executor",
        pattern=r"^[a-z0-9][a-z0-9-]{0,23}$",
        description="First part of its id, and the id of its guest: another one for each that joins the same run.",
    )
    out: AnyPath = Field(default=Path("runs"), description="Folder that gets one output folder, with the logs.")
    port: int = Field(default=0, ge=0, le=65_535, description="Loopback port of the counts; 0 takes any free one.")
    metrics_port: int = Field(default=0, ge=0, le=65_535, description="Loopback port of its metrics; 0 takes any.")
    state: AnyPath = Field(description="Folder of its own for what outlives it: counted tokens, fetched weights.")
    cores: list[int] = Field(default=[], description="Processor cores of the guest; none named: all.")
    profiles: str = Field(
        default="",
        pattern=r"^[^\x00]{0,4095}$",
        description="Folder of step profiles; else where `rose profile` keeps them.",
    )
    certificates: str = CERTIFICATES


class JoinConfig(Section):
    """The run that it lends to."""

    scheduler: _Address = Field(description="HOST:PORT of the run's scheduler.")
    weights: _Address = Field(description="HOST:PORT of the run's publisher, or of a relay.")
    token_file: AnyPath = Field(description="File with the run's token, of mode 0600.")


class ServingConfig(Section):
    """The serving engine beside it."""

    board: AnyPath = Field(description="The board that it shares: its ROSE_SERVING_BOARD, in memory if possible.")
    metrics: _UrlOrNone = Field(
        default="",
        pattern=r"^(http://[^\s/?#@]+(/[^\s#]*)?)?$",
        description="Its metrics page, to be scraped where it has no probe of ours; none: only a probe is looked for.",
    )
    ttft_ms: float = Field(gt=0, le=3_600_000, description="What it owes: time to the first token.")
    tpot_ms: float = Field(gt=0, le=3_600_000, description="What it owes: mean time per token after that.")

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_ms / 1000, self.tpot_ms / 1000)


class GuestConfig(Section):
    """The guest engine; defaults are those of a job's engine."""

    model: AnyPath = Field(description="Base model folder that it starts from, of the run's model.")
    dtype: Dtype = Field(default=_ENGINE.dtype, description="Arithmetic of the engine.")
    max_model_len: ModelLen = Field(default=_ENGINE.max_model_len, description="Longest sequence.")
    max_num_seqs: Seqs = Field(default=_ENGINE.max_num_seqs, description="Most requests at once.")
    block_size: BlockTokens = Field(default=_ENGINE.block_size, description="Tokens in one KV block.")
    kv_cache_gib: KvCacheGib = Field(default=_ENGINE.kv_cache_gib, description="Memory for the KV cache, in GiB.")
    stream_interval: int = Field(
        default=_ENGINE.stream_interval, ge=1, le=1024, description="Tokens per streamed piece."
    )
    port: int = Field(default=0, ge=0, le=65_535, description="Loopback port of the engine; 0 takes any free one.")
    move_after_s: Seconds = Field(
        default=2.0, description="A request that serving keeps from computing for so long goes on elsewhere."
    )
    restarts_max: int = Field(default=_ENGINE.restarts_max, ge=0, le=1000, description="Deaths that it survives.")
    start_timeout_s: Seconds = Field(
        default=600.0, description="Longest wait for it to become healthy: it starts on what serving leaves."
    )


class PartitionConfig(Section):
    """What the guest may have at most, of what serving leaves."""

    guest_share: float = Field(
        default=1.0,
        ge=0.01,
        le=1,
        description="Part of the GPU's threads (MPS), or of the guest's cores where there is no GPU; 1: no ceiling.",
    )
    guest_memory_gib: float = Field(
        default=0.0, ge=0, le=1024, description="Memory of each GPU (MPS), in GiB; 0: no limit."
    )

    @property
    def limits(self) -> GuestLimits:
        """None where there is none."""
        share = self.guest_share if self.guest_share < 1 else None
        return GuestLimits(share, self.guest_memory_gib or None)


class MemoryConfig(Section):
    """The memory that both engines' keys and values share; the rule is `kv_policy`."""

    pool_gib: float = Field(
        default=0.0, ge=0, le=4096, description="For both, in GiB; 0 is a fixed split, each keeps its whole cache."
    )
    serving_gib: float = Field(default=0.0, ge=0, le=4096, description="The serving engine's whole cache, in GiB.")
    headroom: float = Field(default=0.2, gt=0, lt=1, description="Share of the pool that is left free for bursts.")
    watermark: float = Field(
        default=0.5, gt=0, lt=1, description="Share of the headroom that serving takes before the guest is cut."
    )
    freeze_s: Seconds = Field(default=30.0, description="How long a cut guest does not grow, in seconds.")
    keep_free_gib: float = Field(
        default=0.0,
        ge=0,
        le=4096,
        description="Memory of the host, in GiB, that a guest may not take, be it asleep: it is ended; 0: none.",
    )


class ExecutorConfig(Section):
    """A whole configuration."""

    executor: ProcessConfig
    join: JoinConfig
    serving: ServingConfig
    guest: GuestConfig
    partition: PartitionConfig = PartitionConfig()
    memory: MemoryConfig = MemoryConfig()

    @model_validator(mode="after")
    def _agree(self) -> ExecutorConfig:
        ports = {
            "executor.port": self.executor.port,
            "executor.metrics_port": self.executor.metrics_port,
            "guest.port": self.guest.port,
        }
        lines = keys.ports_taken_twice(ports)
        if self.memory.pool_gib and not self.memory.serving_gib:
            lines.append("memory.serving_gib = 0: beside memory.pool_gib it must be the serving engine's cache")
        if self.memory.keep_free_gib and not self.memory.pool_gib:
            lines.append("memory.pool_gib = 0: beside memory.keep_free_gib it must be what both engines share")
        if lines:
            raise PydanticCustomError(keys.DISAGREE, "keys disagree", {"lines": lines})
        return self


def load_executor_config(file: Path | None, join: Path | None, flags: Mapping[str, object]) -> ExecutorConfig:
    """The keys of both files, with those of `flags` that are not None in place of [executor]'s.

    `join` is a file with [join] alone, as a run writes it; that table counts then, as a whole. Paths in a file are
    relative to it. Raises ConfigError with every wrong key at once.
    """
    tables = {} if file is None else _read(file, _EXPECTED)
    if join is not None:
        joined = _read(join, _EXPECTED_JOIN)
        if set(joined) != {"join"}:
            raise ConfigError(f"{join}: sections {sorted(joined)}", expected=_EXPECTED_JOIN, to_do="check the path")
        tables["join"] = joined["join"]
    section = tables.get("executor", {})
    if isinstance(section, dict):
        tables["executor"] = section | {key: value for key, value in flags.items() if value is not None}
    try:
        return ExecutorConfig.model_validate(tables)
    except ValidationError as error:
        read = f"{file or 'the flags'}" + (f", with [join] of {join}" if join is not None else "")
        lines = [f"{read}:", *keys.problems(ExecutorConfig, error)]
        raise ConfigError("\n  ".join(lines), to_do="mend them; `rose executor --help` shows every key") from None


_PATHS = {"executor": ("out", "state"), "join": ("token_file",), "serving": ("board",), "guest": ("model",)}
_EXPECTED = "an executor's file in TOML"
_EXPECTED_JOIN = "the lend.toml of a run, with [join] in it"


def _read(file: Path, expected: str) -> dict[str, object]:
    """A file's tables, with the paths in them absolute."""
    tables = toml.read(file, expected)
    base = file.absolute().parent
    for name, paths in _PATHS.items():
        section = tables.get(name)
        if isinstance(section, dict):
            section |= {key: base / section[key] for key in paths if isinstance(section.get(key), str)}
            section |= keys.beside(file, section, "certificates") | keys.beside(file, section, "profiles")
    return tables
