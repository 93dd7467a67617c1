"""A real Chromium, driven over its DevTools socket: enough to open a page, look at it and take its picture."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
TIMEOUT_S = 60.0


class Browser:
    """One page. `complaints` are errors and warnings of its console, and what its scripts raised."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                details = told["params"]["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(told["params"]["entry"]["text"])
            elif told["method"] == "Runtime.consoleAPICalled" and told["params"]["type"] in ("error", "warning"):
                self.complaints.append(str(told["params"]["args"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(self._answers[number], TIMEOUT_S)
        assert "error" not in told, told
        return dict(told["result"])

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, script: str) -> Any:
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, script: str) -> Any:
        """The script's value, as soon as it is truthy."""
        async with asyncio.timeout(TIMEOUT_S):
            while not (value := await self.evaluate(script)):
                await asyncio.sleep(0.1)
        return value

    async def look(self, width: int, height: int, scheme: str) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, file: Path, *, whole: bool = False) -> None:
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Browser]:
    """A browser with a new profile; ended with the body."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not (port_file := profile / "DevToolsActivePort").exists() or not port_file.read_text():
                await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                page = next(one for one in await answer.json() if one["type"] == "page")
            async with http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await browser.call(f"{domain}.enable")
                yield browser
    finally:
        process.kill()
        await process.wait()
