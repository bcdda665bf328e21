"""A headless Chromium, driven over its debugging protocol: what a page logs, asks for and looks like."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


def chromium() -> str:
    """Path of a Chromium; skips the test where there is none."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    pytest.skip(f"no Chromium on PATH ({', '.join(NAMES)})")


@dataclass
class Page:
    socket: aiohttp.ClientWebSocketResponse
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    loaded: bool = False
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self.socket.receive_json(timeout=30)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(str(params["entry"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(str(params["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Page.loadEventFired":
                self.loaded = True

    async def evaluate(self, expression: str) -> Any:
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=scheme)
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.loaded = False
        await self.send("Page.navigate", url=path.resolve().as_uri())
        for _ in range(200):
            if self.loaded:
                return
            await self.evaluate("1")
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{path} did not load")

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """A fresh browser with one empty page."""
    binary = chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            binary,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile, "DevToolsActivePort"))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                    targets = await reply.json()
                url = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    opened = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await opened.send(f"{domain}.enable")
                    yield opened
        finally:
            process.terminate()
            await process.wait()


async def _port(file: Path) -> int:
    for _ in range(300):
        if file.exists() and file.read_text().strip():
            return int(file.read_text().split()[0])
        await asyncio.sleep(0.05)
    raise TimeoutError("Chromium did not open its debugging port")
