"""A real browser for tests: Debian's chromium without a window, which `tests/install-debian` installs."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_LIMIT_S = 60.0
"""A first start on a busy machine takes long."""
WAIT_LIMIT_S = 20.0
POLL_S = 0.05
MISSING = "chromium is not installed; tests/install-debian does it where it may"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
)


def program() -> str | None:
    """Return the browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def skip_without_browser() -> None:
    """Skip the calling module, in one line, where the program is missing. With CI=true its tests fail instead."""
    if program() is None and os.environ.get("CI") != "true":
        pytest.skip(MISSING, allow_module_level=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What a page is looked at on.

    Args:
        width, height: CSS pixels.
        dark: whether the reader prefers dark colours.
        touch: a phone's: its viewport is the width that the page asks for.
    """

    width: int
    height: int
    dark: bool = False
    touch: bool = False

    @property
    def name(self) -> str:
        """Return a name for files."""
        return f"{self.width}-{'dark' if self.dark else 'light'}"


@contextlib.contextmanager
def running_browser() -> Iterator[str]:
    """Start a browser with a profile of its own, and give the address to talk to it."""
    path = program()
    assert path is not None, MISSING
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as home:
        with (Path(home) / "log").open("w") as log:
            process = subprocess.Popen(
                [path, *FLAGS, f"--user-data-dir={home}/profile", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield _address(Path(home), process)
        finally:
            process.terminate()
            process.wait(timeout=20.0)


def _address(home: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait until the browser says where it listens."""
    told, end = home / "profile" / "DevToolsActivePort", time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"chromium ended with {process.returncode}: {(home / 'log').read_text()[-2000:]}")
        lines = told.read_text().splitlines() if told.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(POLL_S)
    raise TimeoutError(f"chromium does not listen after {START_LIMIT_S:.0f} s: {(home / 'log').read_text()[-2000:]}")


class Tab:
    """An open page.

    Args:
        complaints: what its scripts threw, and what they and the browser wrote to the console as errors or warnings.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._session = session
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0

    async def listen(self) -> None:
        """Take what the browser says, until it says no more."""
        async for message in self._socket:
            said = json.loads(message.data)
            waiting = self._answers.pop(said.get("id", -1), None)
            if waiting is not None:
                waiting.set_result(said)
            elif said.get("sessionId") == self._session:
                self._note(said["method"], said["params"])

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one.get("description"))) for one in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the browser's answer to a command of its protocol. Raises RuntimeError when it refuses."""
        self._count += 1
        waiting = self._answers[self._count] = asyncio.get_running_loop().create_future()
        asked = {"id": self._count, "method": method, "params": parameters, "sessionId": self._session}
        await self._socket.send_json(asked)
        said = await asyncio.wait_for(waiting, WAIT_LIMIT_S)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']['message']}")
        result: dict[str, Any] = said["result"]
        return result

    async def value(self, script: str) -> Any:
        """Return what an expression comes to in the page."""
        said = await self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"].get("exception", {}).get("description", script))
        return said["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression comes to something true, and return it."""
        end = time.monotonic() + WAIT_LIMIT_S
        while not (found := await self.value(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"not after {WAIT_LIMIT_S:.0f} s: {script}")
            await asyncio.sleep(POLL_S)
        return found

    async def show(self, url: str, screen: Screen) -> None:
        """Load a page on a screen, and wait until its scripts have run."""
        await self.resize(screen)
        await self.prefer(dark=screen.dark)
        for room in ("Runtime", "Log", "Page"):
            await self.ask(f"{room}.enable")
        await self.ask("Page.navigate", url=url)
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def resize(self, screen: Screen) -> None:
        """Let the page be looked at on another screen; its colours stay."""
        size = {"width": screen.width, "height": screen.height}
        await self.ask("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=screen.touch)
        await self.ask("Emulation.setTouchEmulationEnabled", enabled=screen.touch)

    async def prefer(self, *, dark: bool) -> None:
        """Let the reader prefer dark or light colours from now on."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])

    async def point(self, script: str) -> tuple[float, float]:
        """Bring an element into view, move the pointer to the middle of it, and return where that is.

        Args:
            script: an expression for the element.
        """
        box = await self.value(
            f"(() => {{ const one = {script}; one.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            " const box = one.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]; })()"
        )
        place = box[0] + box[2] / 2.0, box[1] + box[3] / 2.0
        for step in (1, 0):  # a pointer that does not move says nothing
            await self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=place[0] - step, y=place[1])
        return place

    async def click(self, script: str) -> None:
        """Click on the middle of an element."""
        x, y = await self.point(script)
        for kind in ("mousePressed", "mouseReleased"):
            await self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def swipe(self, x: float, start: float, end: float) -> None:
        """Move a finger up or down, in CSS pixels of the screen."""
        for part in range(13):
            points = [{"x": x, "y": start + (end - start) * part / 12.0}]
            await self.ask("Input.dispatchTouchEvent", type="touchMove" if part else "touchStart", touchPoints=points)
        await self.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    async def picture(self) -> bytes:
        """Return the whole page, from its top to its end, as a PNG."""
        await self.value("window.scrollTo(0, 0)")
        said = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(said["data"])


@contextlib.asynccontextmanager
async def open_tab(address: str) -> AsyncIterator[Tab]:
    """Open an empty page in the browser at that address, and close it in the end."""
    async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
        await socket.send_json({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}})
        target = (await _answer(socket, 1))["targetId"]
        attach = {"targetId": target, "flatten": True}
        await socket.send_json({"id": 2, "method": "Target.attachToTarget", "params": attach})
        tab = Tab(socket, (await _answer(socket, 2))["sessionId"])
        listening = asyncio.create_task(tab.listen())
        try:
            yield tab
        finally:
            await socket.send_json({"id": 3, "method": "Target.closeTarget", "params": {"targetId": target}})
            listening.cancel()


async def _answer(socket: aiohttp.ClientWebSocketResponse, number: int) -> dict[str, Any]:
    while True:
        said = json.loads((await socket.receive(timeout=WAIT_LIMIT_S)).data)
        if said.get("id") == number:
            result: dict[str, Any] = said["result"]
            return result
