"""What an installed framework does: `torch.distributed` broadcasts the model over gloo, bucket by bucket."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from bench.codec_versions import Bits

TIMEOUT_S = 120


def join(address: str, port: int, rank: int) -> None:
    """One of two processes; rank 0 is at `address`. Blocks until the other one has come. Raises RuntimeError."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def broadcast(buckets: list[Bits]) -> None:
    """From rank 0 into the other one's buckets, as a type that gloo knows. Raises RuntimeError."""
    for bits in buckets:
        dist.broadcast(torch.from_numpy(bits.view("float32")), src=0)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
