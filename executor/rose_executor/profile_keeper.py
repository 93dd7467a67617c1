"""Keeps what a profile has learnt meanwhile: the driver that writes it back now and then, and at the end.

Invariants
- Nothing is written before something was learnt, nor while the profile has drifted: what is in force then is about to
  change, and the margin that makes up for it is not kept.
- A disk that fails ends nothing: it is `trouble`, and tried again.
- Whoever steps never waits for the disk: a thread writes what was known when it began, one at a time.
"""

from __future__ import annotations

import threading

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
        self._looked_at_s: float | None = None
        self._writing: threading.Thread | None = None

    def stepped(self, now_s: float) -> None:
        """To be called after steps, by who teaches the profile; `SAVE_EVERY_S` apart it writes, beside them."""
        if self._looked_at_s is None:
            self._looked_at_s = now_s
        if now_s - self._looked_at_s < SAVE_EVERY_S or (self._writing is not None and self._writing.is_alive()):
            return
        self._looked_at_s = now_s
        state = self._news()
        if state is not None:
            self._writing = threading.Thread(target=self._keep, args=(state,), name="step profile", daemon=True)
            self._writing.start()

    def save(self) -> None:
        """Now, waiting for the disk: for the end."""
        if self._writing is not None:
            self._writing.join()
        state = self._news()
        if state is not None:
            self._keep(state)

    def _news(self) -> ProfileState | None:
        learnt = self._profile.steps != self._kept_steps
        return self._profile.state() if learnt and self._profile.drifted is None else None

    def _keep(self, state: ProfileState) -> None:
        try:
            self._store.keep(self._key, state)
        except RoseError as error:
            if not self.trouble:
                log.warning("what was learnt of the guest's steps cannot be kept", why=str(error))
            self.trouble = str(error)
            return
        self.trouble = ""
        self._kept_steps = state.steps
