"""A real engine that joins a run as an executor's would: found by lend.toml, offered as lent, counted over the network.

Not a test module.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.access import read_token
from rose.certificates import read_certificates
from rose.waits import WaitBoard
from rose_executor.counts_service import serve_counts
from rose_executor.page_shelf import PageShelf
from rose_executor.token_route import TokenRoute
from rose_scheduler.client import EngineState, SchedulerClient
from rose_scheduler.events import EngineKind, EngineOffered


@dataclass
class Guest:
    """An engine at version 0, lent."""

    engine: Any

    async def sampled(self, tokens: int) -> None:
        """Wait until it has sampled so many more."""
        before = self.engine.page.total()
        while self.engine.page.total() < before + tokens:
            await asyncio.sleep(0.002)

    def kill(self) -> None:
        os.kill(self.engine.pid, signal.SIGKILL)


@asynccontextmanager
async def a_guest(rig: Any, model: Path, folder: Path, runtime: Path, certificates: str = "") -> AsyncIterator[Guest]:
    """Lent to the run whose runtime folder that is, as soon as it lends, until the body ends.

    It has answered a question of its owner's by then, which is none of the run's business.
    """
    while not (runtime / "lend.toml").exists():
        await asyncio.sleep(0.02)
    join = tomllib.loads((runtime / "lend.toml").read_text())["join"]
    token, waits = read_token(Path(join["token_file"])), WaitBoard()
    own = read_certificates(certificates)
    shelf = PageShelf(folder, waits)
    engine = rig.new_engine(
        "guest", model_dir=model, runtime_dir=folder, log_path=folder / "guest.log", max_model_len=1024
    )
    server, counts = await serve_counts(shelf, lambda incarnation: engine.alive, port=0, token=token, certificates=own)
    try:
        await engine.start(0)
        await TokenRoute(engine.base_url, rig.session).generate(
            "known", [5, 6, 7], max_tokens=8, temperature=0.0, stop_token_ids=()
        )
        shelf.set_apart(engine.incarnation)
        offer = EngineOffered(
            "guest", engine.incarnation, EngineKind.LENT, engine.base_url, engine.settings.max_num_seqs, 0, counts
        )
        async with SchedulerClient(join["scheduler"], token=token, waits=waits, certificates=own) as client:
            state = EngineState(0, engine.settings.max_num_seqs, 0.0)
            keeping = asyncio.create_task(client.keep_offered(offer, lambda: state, every_s=0.2))
            try:
                yield Guest(engine)
                # Until the run has ended: whoever lends stays to be asked.
                await asyncio.Event().wait()
            finally:
                keeping.cancel()
    finally:
        await engine.stop()
        await server.stop(None)
        shelf.close()
