"""Keys and values of an old version that running requests keep: nothing else may read them.

After an update a request in flight either recomputes its context, or goes on with what it has. In the second case

Invariants
- No block that was filled before the update is found by any request's prefix any more.
- What a kept request fills from then on, under the new version but behind an old context, is found by that very
  request alone: its hashes are salted with its own id, and those that follow are chained to them. One that has not
  filled a block yet is given a salt for its first.
- Requests that hold nothing yet are untouched: they compute everything under the new version.

vLLM's own reset refuses while blocks are in use.
"""

from __future__ import annotations

import hashlib
from typing import Any


def rekey(scheduler: Any, version: int) -> str:
    """Part old keys and values from the new version; between two steps. Why that is not possible here, or ""."""
    if scheduler.connector is not None:
        return "keys and values that a connector holds elsewhere cannot be kept apart by version"
    pool = scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
    scheduler.forget_kept()
    for request in scheduler.running:
        salt = f"{version} {request.request_id}"
        request.cache_salt = salt
        request.block_hashes[:] = [hashlib.sha256(salt.encode() + found).digest() for found in request.block_hashes]
    return ""
