"""The system's Chromium, driven through its DevTools protocol over a pair of pipes: no port, no client library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LONGEST_ANSWER_S = 60


def found() -> str | None:
    """The browser's path, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


@contextmanager
def running():
    """A browser without a profile of anybody's, gone with all its processes at the end."""
    to_child, from_us = _pipe()
    from_child, to_us = _pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            found(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
            "--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        quiet = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, quiet, 0), (os.POSIX_SPAWN_DUP2, quiet, 1), (os.POSIX_SPAWN_DUP2, quiet, 2),
                   (os.POSIX_SPAWN_DUP2, to_child, 3), (os.POSIX_SPAWN_DUP2, to_us, 4)]  # fmt: skip
        pid = os.posix_spawn(command[0], command, dict(os.environ), file_actions=actions, setpgroup=0)
        for fd in (to_child, to_us, quiet):
            os.close(fd)
        try:
            yield Browser(from_us, from_child)
        finally:
            os.close(from_us)
            os.close(from_child)
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _pipe() -> tuple[int, int]:
    """A pipe's ends above the numbers that the browser expects its own at."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in ends)
    for fd in ends:
        os.close(fd)
    return moved


class Browser:
    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._last = 0
        self.events: list[dict] = []

    def call(self, method: str, session: str | None = None, **params):
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(method)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self, doing: str) -> dict:
        deadline = time.monotonic() + LONGEST_ANSWER_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError(f"{doing}: {'the browser has gone' if ready else 'no answer from the browser'}")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        tab = Tab(self, target, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        tab.scheme(scheme)
        tab.call("Page.navigate", url=path.as_uri())
        tab.wait_for("document.readyState === 'complete' && document.documentElement.dataset.ready === 'yes'")
        return tab


class Tab:
    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session

    def call(self, method: str, **params):
        return self.browser.call(method, self.session, **params)

    def scheme(self, value: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def value(self, expression: str):
        """What an expression comes to; a thrown error is raised here."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait_for(self, expression: str, limit_s: float = 30) -> None:
        deadline = time.monotonic() + limit_s
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise RuntimeError(f"never came true: {expression}; {self.complaints()}")
            time.sleep(0.02)

    def point(self, x: float, y: float, click: bool = False) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, *keys: str) -> None:
        for key in keys:
            more = {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else {}
            more |= {"windowsVirtualKeyCode": 9} if key == "Tab" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **more)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def picture(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))["data"]
        path.write_bytes(base64.b64decode(data))

    def _clip(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, thrown errors, and whatever the policy blocked."""
        out = []
        for event in self._mine():
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                out.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                out.append(str([a.get("value", a.get("description")) for a in params["args"]]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                out.append(params["entry"]["text"])
        return out

    def requested(self) -> list[str]:
        """Addresses that the page asked for."""
        return [e["params"]["request"]["url"] for e in self._mine() if e["method"] == "Network.requestWillBeSent"]

    def _mine(self) -> list[dict]:
        return [e for e in self.browser.events if e.get("sessionId") == self.session]

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
