"""Profiles on disk, one file for each key, found again at the next start.

Invariants
- A file appears whole or not at all, and what is read was checked: numbers, ranges, key. A damaged file is refused, not
  repaired and not passed over; whoever removes it begins anew.
- Nothing else is kept in the folder, and nothing there is removed.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rose.errors import ClusterError, ConfigError, EngineError, RoseError
from rose.logs import logger
from rose.small_file import read_small_file
from rose_executor.profile_key import ProfileKey
from rose_executor.step_profile import ProfileState, StepProfile
from rose_transfer.store.files import write_whole

FORMAT: Final = 1
_FILE_BYTES_MAX = 1 << 16
_EXPECTED = "a step profile as `rose profile` writes it"
_ROUNDING = 1e-3
log = logger("profiles")
_TO_DO = "remove it, or make it anew: rose profile MODEL"

_Part = Annotated[float, Field(ge=0, le=3600)]
_Variance = Annotated[float, Field(ge=-1e12, le=1e12)]
_Count = Annotated[int, Field(ge=1, le=2**53)]
_Behind = Annotated[int, Field(ge=0, le=2**53)]
_Row = tuple[_Variance, _Variance, _Variance, _Variance]
_Amounts = tuple[_Count, _Count, _Behind]


class _File(BaseModel):
    """All of one file. See `ProfileKey` and `ProfileState`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    format: Literal[1] = FORMAT
    model: str
    device: str
    cores: int
    vllm: str
    settings: str
    parts: tuple[_Part, _Part, _Part, _Part]
    covariance: tuple[_Row, _Row, _Row, _Row]
    least: _Amounts
    most: _Amounts
    spread: Annotated[float, Field(gt=0, le=100)]
    steps: _Count

    @model_validator(mode="after")
    def _sound(self) -> _File:
        if any(self.covariance[at][at] <= 0 for at in range(4)):
            raise ValueError("covariance: a variance is not above 0")
        for row, column in itertools.combinations(range(4), 2):
            most = (self.covariance[row][row] * self.covariance[column][column]) ** 0.5
            one, other = self.covariance[row][column], self.covariance[column][row]
            if abs(one - other) > _ROUNDING * most or abs(one) > (1 + _ROUNDING) * most:
                raise ValueError("covariance: it is none")
        if any(more < less for less, more in zip(self.least, self.most, strict=True)):
            raise ValueError("most: less than least")
        return self


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's profiles are: `rose/profiles` in XDG_STATE_HOME, or in ~/.local/state."""
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "rose" / "profiles"


class ProfileStore:
    """The profiles in `folder`, which need not exist yet. Safe to share between processes: the last writer wins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: ProfileKey) -> Path:
        return self.folder / key.file_name

    def find(self, key: ProfileKey) -> StepProfile | None:
        """The profile of a key, None if there is none. Raises ConfigError if its file is damaged or of another key."""
        path = self.path(key)
        if not os.path.lexists(path):
            return None
        found = _read(path)
        other = [name for name, value in asdict(key).items() if getattr(found, name) != value]
        if other:
            raise ConfigError(f"{path} is of another {' and '.join(other)}", expected=_EXPECTED, to_do=_TO_DO)
        return _profile(found)

    def keep(self, key: ProfileKey, state: ProfileState) -> Path:
        """Put what a profile knows where `find` looks, and say where.

        Raises ClusterError if that cannot be written, EngineError if it is nothing that `find` would take: the profile
        that is there stays.
        """
        path = self.path(key)
        try:
            text = _File(**asdict(key), **_plain(state)).model_dump_json(indent=2)
        except ValidationError as error:
            raise EngineError(f"what was learnt of steps is no profile: {_first(error)}", expected=_EXPECTED) from None
        self.prepare()
        try:
            write_whole(path, f"{text}\n".encode())
        except OSError as error:
            raise _unwritten(path, error) from error
        return path

    def prepare(self) -> None:
        """Have the folder, if it can be written to. Raises ClusterError if not: before much work, rather than after."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise _unwritten(self.folder, error) from error


def read_profile(path: Path) -> StepProfile:
    """Of whatever key. Raises ConfigError if the file is damaged."""
    return _profile(_read(path))


def begun_profile(path: Path | None) -> StepProfile:
    """What an engine begins with: one that nobody has kept, or that is damaged by now, knows nothing yet."""
    try:
        return StepProfile() if path is None or not path.exists() else read_profile(path)
    except (RoseError, OSError) as error:
        log.warning("a kept step profile is of no use, the engine begins without", path=str(path), why=str(error))
        return StepProfile()


def _profile(found: _File) -> StepProfile:
    state = ProfileState(found.parts, found.covariance, found.least, found.most, found.spread, found.steps)
    return StepProfile(state)


def _unwritten(path: Path, error: OSError) -> ClusterError:
    return ClusterError(
        f"step profiles cannot be kept in {path}: {error.strerror}",
        to_do="free some space, or name a folder that can be written to",
    )


def _plain(state: ProfileState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ("parts", "covariance", "least", "most", "spread", "steps")}


def _read(path: Path) -> _File:
    text = read_small_file(path, _FILE_BYTES_MAX, _EXPECTED).content
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        if found.get("format") != FORMAT:
            raise ValueError(f"format {found.get('format')!r:.20}, not {FORMAT}")
        return _File.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{path} is damaged: {_first(error)}", expected=_EXPECTED, to_do=_TO_DO) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}", expected=_EXPECTED, to_do=_TO_DO) from None


def _first(error: ValidationError) -> str:
    """What is wrong first, and where."""
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
