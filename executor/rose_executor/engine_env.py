"""The one place for the names of environment variables that an engine reads.

Invariants
- In a process that has no `ROSE_ENGINE_ID` the plugin does nothing that its user has not asked for: a user's own vLLM
  in the same environment loads it too and must not notice.
- A serving engine is the user's own: all that it reads of ours is `ROSE_SERVING_*`.
- What `torch` and `vllm` read while they are imported is in `IMPORT_ENV`: a warm process must be started
  with it, a forked engine can no longer change it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ConfigError

ENGINE_ID = "ROSE_ENGINE_ID"
INCARNATION = "ROSE_INCARNATION"
WEIGHT_VERSION = "ROSE_WEIGHT_VERSION"
CONTROL_SOCKET = "ROSE_CONTROL_SOCKET"
TOKEN_PAGE = "ROSE_TOKEN_PAGE"
BOARD = "ROSE_BOARD"
STEP_LOG = "ROSE_STEP_LOG"
STEP_PROFILE = "ROSE_STEP_PROFILE"
SERVING_BOARD = "ROSE_SERVING_BOARD"
SERVING_PROFILE = "ROSE_SERVING_PROFILE"
SERVING_KV_SPARE = "ROSE_SERVING_KV_SPARE"
UNPACKED_WEIGHTS = "ROSE_UNPACKED_WEIGHTS"
MPS_DIRECTORY = "ROSE_MPS_DIRECTORY"
"""For an engine's guards: the MPS daemon that it is to be released from before they end it."""

# Dynamo would compile the log-prob kernels with g++ on the first token (12 s on two cores); more than one
# OpenMP thread per engine spins at barriers as soon as the cores are shared.
IMPORT_ENV: Mapping[str, str] = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "rose",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# What a user may have exported for engines of their own: the command line's size of the KV cache counts, and
# vLLM's development routes, which anybody on the machine could call, stay off.
_NOT_INHERITED = (
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY"),
    *(SERVING_BOARD, SERVING_PROFILE, SERVING_KV_SPARE),
)


@dataclass(frozen=True, slots=True)
class EngineEnv:
    """What one incarnation of an engine is told through its environment.

    `incarnation` is 16 hex digits, new at every start. `unpacked_weights` keeps plain parameters on CPU,
    without which weights cannot be replaced in place. An engine with a `step_log` writes its steps to it; what a
    guest's steps are known to cost is in `step_profile`.
    """

    engine_id: str
    incarnation: str
    weight_version: int
    control_socket: Path
    token_page: Path
    unpacked_weights: bool = True
    board: Path | None = None
    step_log: Path | None = None
    step_profile: Path | None = None

    def variables(self) -> dict[str, str | None]:
        """Changes to an environment, as `launcher.Command` takes them."""
        return {
            **dict.fromkeys(_NOT_INHERITED),
            # vLLM's processes put sockets and files between them there. A killed engine leaves them; the run's end,
            # which removes this folder, does not.
            "TMPDIR": str(self.control_socket.parent),
            ENGINE_ID: self.engine_id,
            INCARNATION: self.incarnation,
            WEIGHT_VERSION: str(self.weight_version),
            CONTROL_SOCKET: str(self.control_socket),
            TOKEN_PAGE: str(self.token_page),
            UNPACKED_WEIGHTS: "1" if self.unpacked_weights else "0",
            BOARD: None if self.board is None else str(self.board),
            STEP_LOG: None if self.step_log is None else str(self.step_log),
            STEP_PROFILE: None if self.step_profile is None else str(self.step_profile),
        }

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> EngineEnv | None:
        """The settings of this process, None if it is not an engine that ROSE started."""
        if ENGINE_ID not in environ:
            return None
        return cls(
            engine_id=environ[ENGINE_ID],
            incarnation=environ[INCARNATION],
            weight_version=int(environ[WEIGHT_VERSION]),
            control_socket=Path(environ[CONTROL_SOCKET]),
            token_page=Path(environ[TOKEN_PAGE]),
            unpacked_weights=environ[UNPACKED_WEIGHTS] == "1",
            board=Path(environ[BOARD]) if BOARD in environ else None,
            step_log=Path(environ[STEP_LOG]) if STEP_LOG in environ else None,
            step_profile=Path(environ[STEP_PROFILE]) if STEP_PROFILE in environ else None,
        )


def serving_board(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where a serving engine's probe writes, None if this process is none that anybody wants to see."""
    return Path(environ[SERVING_BOARD]) if environ.get(SERVING_BOARD) else None


def serving_profile(environ: Mapping[str, str] = os.environ) -> Path | None:
    """What the serving engine's steps are known to cost, None if nobody has said."""
    return Path(environ[SERVING_PROFILE]) if environ.get(SERVING_PROFILE) else None


def serving_kv_spare(environ: Mapping[str, str] = os.environ) -> float | None:
    """The share of its KV cache that a serving engine keeps in memory beyond what it uses; None to keep all of it.

    Raises ConfigError for what is no share.
    """
    text = environ.get(SERVING_KV_SPARE)
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if 0 <= (spare := float(text)) <= 1:
            return spare
    raise ConfigError(f"{SERVING_KV_SPARE} is {text!r}", expected="a share of the KV cache, from 0 to 1")
