"""Publishing a model that no rank of its trainer holds whole.

Follow a version: `agreement` says whether all ranks mean the same one, `routes` which rank owns which bucket and who
sends it which pieces, `pieces` cuts these out of the ranks' tensors, `owned` turns buckets into deltas, and the rank
with the store writes what the owners made. `publisher` goes through these steps; `ranks` is how ranks reach each other.
"""

from rose_transfer.sharded.publisher import ShardedPublisher
from rose_transfer.sharded.ranks import LostRank

__all__ = ["LostRank", "ShardedPublisher"]
