"""A director for tests of its death: starts one child that would run for ever, says its process id, then sleeps."""

from __future__ import annotations

import asyncio

from rose.demo.child import Program, start_child
from rose.waits import WaitBoard


async def main() -> None:
    child = await start_child(Program("server", "http.server", ("0",)), lambda pid: None, WaitBoard())
    print(f"pid {child.pid}", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
