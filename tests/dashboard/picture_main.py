"""Takes the picture of the documents: `./dev python tests/dashboard/picture_main.py FILE.png`, about a minute."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from browser import browsing
from dashboard_process import DashboardProcess
from fleet import fleet

WIDTH, HEIGHT = 1360, 1180
SECONDS = 75


async def main(file: Path, folder: Path) -> None:
    with fleet(folder) as shown, contextlib.closing(DashboardProcess(folder)) as dashboard:
        async with browsing(folder / "profile") as browser:
            await browser.look(WIDTH, HEIGHT, "light")
            await browser.goto(dashboard.url)
            for _ in range(SECONDS):
                shown.move()
                await asyncio.sleep(1)
            await browser.picture(file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="rose-") as temporary:
        os.environ["ROSE_RUNTIME_DIR"] = str(Path(temporary) / "rt")
        asyncio.run(main(Path(sys.argv[1]).absolute(), Path(temporary)))
