"""What a scheduler is started with: every key of its file, with default, bounds and one line on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rose import keys, toml
from rose.config import CERTIFICATES, AnyPath, Seconds
from rose.errors import ConfigError
from rose.keys import Section
from rose_scheduler.limits import Limits

_DEFAULT = Limits()


class ServiceConfig(Section):
    """The process."""

    name: str = Field(
        default="scheduler", pattern=r"^[a-z0-9][a-z0-9-]{0,23}$", description="First part of its id in `rose status`."
    )
    out: AnyPath = Field(default=Path("runs"), description="Folder that gets one output folder, with the log.")
    port: int = Field(default=0, ge=0, le=65_535, description="Loopback port; 0 takes any free one.")
    metrics_port: int = Field(default=0, ge=0, le=65_535, description="Loopback port of its metrics; 0 takes any.")
    token_file: AnyPath = Field(description="File with the token that every caller must show, of mode 0600.")
    certificates: str = CERTIFICATES


class LimitsConfig(Section):
    """How much it remembers, and how long it believes."""

    beat_deadline_s: Seconds = Field(default=_DEFAULT.beat_deadline_s, description="Silence that makes one stale.")
    dead_after_s: Seconds = Field(default=_DEFAULT.dead_after_s, description="Silence that makes an engine dead.")
    waiting: int = Field(default=_DEFAULT.waiting, ge=1, le=1 << 20, description="Leases that may wait at once.")
    engines: int = Field(default=_DEFAULT.engines, ge=1, le=1 << 16, description="Engines known at once.")
    trajectories: int = Field(
        default=_DEFAULT.trajectories, ge=1, le=1 << 24, description="Trajectories remembered between turns."
    )
    ended: int = Field(default=_DEFAULT.ended, ge=1, le=1 << 24, description="Leases remembered after their end.")
    retry_after_s: Seconds = Field(
        default=_DEFAULT.retry_after_s, description="When to ask again if too many wait already."
    )

    @model_validator(mode="after")
    def _agree(self) -> LimitsConfig:
        if self.beat_deadline_s >= self.dead_after_s:
            line = (
                f"limits.beat_deadline_s = {self.beat_deadline_s}: allowed is below limits.dead_after_s,"
                f" {self.dead_after_s}"
            )
            raise PydanticCustomError(keys.DISAGREE, "keys disagree", {"lines": [line]})
        return self

    def limits(self) -> Limits:
        return Limits(**self.model_dump())


class SchedulerConfig(Section):
    """A whole file."""

    scheduler: ServiceConfig
    limits: LimitsConfig = LimitsConfig()


def load_config(file: Path | None, flags: Mapping[str, object]) -> SchedulerConfig:
    """The file's keys, if there is one, with those of `flags` that are not None in place of [scheduler]'s.

    Paths in the file are relative to it. Raises ConfigError with every wrong key at once.
    """
    tables = {} if file is None else toml.read(file, _EXPECTED)
    section = tables.get("scheduler", {})
    if isinstance(section, dict):
        if file is not None:
            section |= {key: file.absolute().parent / section[key] for key in _PATHS if _is_text(section.get(key))}
            section |= keys.beside(file, section, "certificates")
        tables["scheduler"] = section | {key: value for key, value in flags.items() if value is not None}
    try:
        return SchedulerConfig.model_validate(tables)
    except ValidationError as error:
        lines = [f"{file or 'the flags'}:", *keys.problems(SchedulerConfig, error)]
        raise ConfigError("\n  ".join(lines), to_do="mend them; `rose scheduler --help` shows every key") from None


_PATHS = ("out", "token_file")
_EXPECTED = "a scheduler's file in TOML"


def _is_text(value: object) -> bool:
    return isinstance(value, str)
