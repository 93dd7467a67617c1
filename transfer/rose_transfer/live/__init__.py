"""Deltas applied to weights where they lie: in the tensors of a live engine, not in buckets.

`held` finds the parts of each bucket in local memory, `runs` how its tiles are reached there, `live_weights` reads and
writes that memory, `live_update` stages a way to a version, commits it and can take it back.
"""

from rose_transfer.live.held import wanted_buckets
from rose_transfer.live.live_update import LiveUpdate, Mixed, RolledBack
from rose_transfer.live.live_weights import LiveWeights

__all__ = ["LiveUpdate", "LiveWeights", "Mixed", "RolledBack", "wanted_buckets"]
