"""Keeps what a profile has learnt meanwhile: the driver that writes it back now and then, and at the end.

Invariants
- Nothing is written before something was learnt, nor while the profile has drifted: what is in force then is about to
  change, and the margin that makes up for it is not kept.
- A disk that fails ends nothing: it is `trouble`, for the status to show, and tried again. Anything else that fails
  ends `run`, and is its owner's to raise.
- The event loop waits for the disk at the end alone. What was learnt last is what stays, also where `run` was cancelled
  while it wrote.
"""

from __future__ import annotations

import asyncio
import threading
from typing import NoReturn

from rose.errors import RoseError
from rose.logs import logger
from rose_executor.profile_key import ProfileKey
from rose_executor.profile_store import ProfileStore
from rose_executor.step_profile import ProfileState, StepProfile

log = logger("step profile")

SAVE_EVERY_S = 60.0


class ProfileKeeper:
    """Of one profile under one key. `trouble` says why it could last not be kept, "" if it could."""

    def __init__(self, store: ProfileStore, key: ProfileKey, profile: StepProfile) -> None:
        self.trouble = ""
        self._store = store
        self._key = key
        self._profile = profile
        self._kept_steps = profile.steps
        self._writing = threading.Lock()

    async def run(self, every_s: float = SAVE_EVERY_S) -> NoReturn:
        """Until cancelled. Sleeping between two times is no wait for anybody, so it has no deadline."""
        while True:
            await asyncio.sleep(every_s)
            state = self._news()
            if state is not None:
                await asyncio.to_thread(self._keep, state)

    def save(self) -> None:
        """Now, waiting for the disk: for the end."""
        state = self._news()
        if state is not None:
            self._keep(state)

    def _news(self) -> ProfileState | None:
        learnt = self._profile.steps != self._kept_steps
        return self._profile.state() if learnt and self._profile.drifted is None else None

    def _keep(self, state: ProfileState) -> None:
        with self._writing:
            if state.steps > self._kept_steps:
                self._put(state)

    def _put(self, state: ProfileState) -> None:
        try:
            self._store.keep(self._key, state)
        except RoseError as error:
            if not self.trouble:
                log.warning("what was learnt of the guest's steps cannot be kept", why=str(error))
            self.trouble = str(error)
            return
        self.trouble = ""
        self._kept_steps = state.steps
