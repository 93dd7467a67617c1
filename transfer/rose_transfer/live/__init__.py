"""Deltas applied to weights where they lie: in the tensors of a live engine, not in buckets.

`held` finds the parts of each bucket in local memory, `runs` how its tiles are reached there, `live_weights` reads and
writes that memory, `live_update` stages a way to a version, commits it and can take it back.

Who owns an engine asks for `wanted_buckets` alone and runs without torch; the rest imports it.
"""

from typing import TYPE_CHECKING

from rose_transfer.live.held import wanted_buckets

if TYPE_CHECKING:
    from rose_transfer.live.live_update import LiveUpdate, Mixed, RolledBack
    from rose_transfer.live.live_weights import LiveWeights

__all__ = ["LiveUpdate", "LiveWeights", "Mixed", "RolledBack", "wanted_buckets"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LiveWeights":
        from rose_transfer.live import live_weights

        return live_weights.LiveWeights
    from rose_transfer.live import live_update

    return getattr(live_update, name)
