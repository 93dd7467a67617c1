"""Feeds events to pure cores: `real` on the monotonic clock, `virtual` on a seeded clock with `faults`.

Nothing is imported here, so that a core can use `core.After` without asyncio.
"""
