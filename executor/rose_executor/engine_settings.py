"""What one engine is: everything its owner decides, checked before any process exists."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ClusterError, ConfigError
from rose_transfer.layout.checkpoint import model_shapes

# Kernel limit of a unix socket's path, less the terminating zero and the dot of its first name.
_SOCKET_PATH_BYTES_MAX = 106


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine and its place on this machine.

    `kv_cache_bytes` is touched at once on CPU, but by a guest; `max_model_len` counts prompt and output tokens
    together; `stream_interval` is the number of tokens per streamed chunk; `port` 0 takes a free one. `runtime_dir`
    holds the control socket, so its path must be short; token pages go to `page_dir`, or there too.
    `async_scheduling` is the way of GPU engines. `unpacked_weights` must stay on wherever weights are updated in place
    on CPU. With a `board` the engine is a guest: it computes only what the quota there allows, and nothing while nobody
    renews that; what its steps are known to cost is in `step_profile`, if it is. With a `step_log` it writes each of
    its steps to that file; without a board it is there to be profiled.
    """

    engine_id: str
    model_dir: Path
    runtime_dir: Path
    log_path: Path
    dtype: str = "float32"
    max_model_len: int = 1024
    max_num_seqs: int = 128
    block_size: int = 32
    kv_cache_bytes: int = 128 * 2**20
    stream_interval: int = 8
    port: int = 0
    start_timeout_s: float = 120.0
    async_scheduling: bool = False
    unpacked_weights: bool = True
    board: Path | None = None
    page_dir: Path | None = None
    step_log: Path | None = None
    step_profile: Path | None = None

    @property
    def control_socket(self) -> Path:
        return self.runtime_dir / f"{self.engine_id}.sock"

    def token_page(self, incarnation: str) -> Path:
        return (self.page_dir or self.runtime_dir) / f"{self.engine_id}.{incarnation}.page"

    def check(self, model_dir: Path) -> None:
        """Raises ConfigError for what the caller must mend, ClusterError if the port is taken."""
        model_shapes(model_dir)
        if len(str(self.control_socket).encode()) > _SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"the runtime directory {self.runtime_dir} is too long for a socket in it",
                expected=f"at most {_SOCKET_PATH_BYTES_MAX} bytes with {self.control_socket.name}",
            )
        if not self.runtime_dir.is_dir():
            raise ConfigError(f"the runtime directory {self.runtime_dir} does not exist")
        if self.port:
            self._check_port()

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise ClusterError(
                    f"port {self.port} of {self.engine_id} cannot be used: {error.strerror}",
                    expected="a free port of the loopback address",
                    to_do="end the process that holds it, or set the port to 0 for any free one",
                ) from error

    def arguments(self, model_dir: Path) -> Sequence[str]:
        """vLLM's command line."""
        return (
            *("--model", str(model_dir)),
            *("--served-model-name", self.engine_id),
            *("--host", "127.0.0.1"),
            *("--port", str(self.port)),
            *("--dtype", self.dtype),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--block-size", str(self.block_size)),
            *("--kv-cache-memory-bytes", str(self.kv_cache_bytes)),
            *("--stream-interval", str(self.stream_interval)),
            *("--scheduler-cls", self._scheduler()),
            *("--worker-extension-cls", "rose_executor.weight_worker.WeightWorker"),
            *("--logprobs-mode", "processed_logprobs"),
            "--enforce-eager",
            "--enable-scale-out",
            "--disable-uvicorn-access-log",
        )

    def _scheduler(self) -> str:
        module, name = "counting_scheduler", "Counting"
        if self.board is not None:
            module, name = "quota_scheduler", "Quota"
        elif self.step_log is not None:
            module, name = "step_recorder", "Recording"
        return f"rose_executor.{module}.{name}{'Async' if self.async_scheduling else ''}Scheduler"
