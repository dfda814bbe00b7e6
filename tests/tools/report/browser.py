"""A page in headless Chromium, over its DevTools protocol: what it draws, says on the console, asks for, and takes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0"),
)


@dataclass
class Page:
    """One open page. `messages` are errors and warnings of its console, `requests` the addresses it asks for."""

    socket: aiohttp.ClientWebSocketResponse
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    last_id: int = 0

    async def call(self, method: str, **params: Any) -> Any:
        self.last_id += 1
        await self.socket.send_json({"id": self.last_id, "method": method, "params": params})
        while True:
            message = await self.socket.receive_json(timeout=60)
            if message.get("id") == self.last_id:
                assert "error" not in message, message
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.messages.append(str([part.get("value") for part in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def evaluate(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def open(self, path: Path) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=path.resolve().as_uri())
        await self.wait_for("document.readyState === 'complete' && performance.timing.loadEventEnd > 0")

    async def wait_for(self, condition: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not await self.evaluate(condition):
            assert time.monotonic() < end, condition
            await asyncio.sleep(0.05)

    async def draw_all(self) -> int:
        """Scroll through the page, as a reader does; returns the number of its charts."""
        script = """(async () => {
            const charts = [...document.querySelectorAll('[data-chart]')];
            for (const chart of charts) {
                chart.scrollIntoView({block: 'center'});
                for (let i = 0; i < 300 && !chart.querySelector('.main-svg'); i++)
                    await new Promise((done) => setTimeout(done, 20));
            }
            return charts.filter((chart) => chart.querySelector('.main-svg')).length;
        })()"""
        return int(await self.evaluate(script))

    async def screenshot(self, target: Path, *, width: int, height: int) -> None:
        """The part of the page that is in view."""
        result = await self.call("Page.captureScreenshot", format="png")
        target.write_bytes(base64.b64decode(result["data"]))

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )


@contextlib.contextmanager
def _chromium() -> Iterator[str]:
    """Address of the DevTools of a Chromium with a new profile."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file, end = Path(profile) / "DevToolsActivePort", time.monotonic() + 60
            while not (port_file.is_file() and len(port_file.read_text().splitlines()) == 2):
                assert time.monotonic() < end and process.poll() is None, "Chromium does not start"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
        finally:
            process.terminate()
            process.wait(20)


def in_browser(path: Path, visit: Callable[[Page], Coroutine[Any, Any, Any]], *, times: int = 1) -> list[Any]:
    """What `visit` returns of the page at `path`, opened so many times in one Chromium."""

    async def all_visits(address: str) -> list[Any]:
        results = []
        async with aiohttp.ClientSession() as session:
            for _ in range(times):
                async with session.put(f"{address}/json/new?about:blank") as reply:
                    target = await reply.json(content_type=None)
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.size(1360, 900)
                    await page.open(path)
                    results.append(await visit(page))
                async with session.get(f"{address}/json/close/{target['id']}"):
                    pass
        return results

    with _chromium() as address:
        return asyncio.run(all_visits(address))
