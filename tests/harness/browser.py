"""A headless Chromium, by the DevTools protocol over a pipe, and a server of files: pages are opened and used by tests.

with served(folder) as url, Browser() as browser:
    browser.open(url)
    browser.wait("document.title")
    browser.press("ArrowDown", alt=True)
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("background-networking", "component-update", "sync", "gpu", "quic", "dev-shm-usage")
KEYS = {"ArrowUp": 38, "ArrowDown": 40, "Delete": 46, "Enter": 13, "Escape": 27}


class Browser:
    """One tab. requests: all addresses that were asked for; problems: what the console has said of errors"""

    def __init__(self, width: int = 1440, height: int = 1000) -> None:
        assert CHROMIUM is not None
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._profile = tempfile.mkdtemp()
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        options = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in QUIET)]
        command = [CHROMIUM, *options, "--remote-debugging-pipe", f"--user-data-dir={self._profile}", "about:blank"]

        def ends() -> None:  # the browser reads descriptor 3, and writes to 4
            high = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (theirs, answers)]  # neither may be 3 or 4
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, preexec_fn=ends, close_fds=False, **quiet)
        os.close(theirs)
        os.close(answers)
        self._number, self._rest, self._session = 0, b"", ""
        (page, *_) = (each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    # ---- messages

    def call(self, method: str, *, seconds: float = 60, **params: Any) -> dict[str, Any]:
        """Returns the result of a method of the protocol. Raises RuntimeError for what it refuses."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + seconds
        while (answer := self._next(until)).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            if not ready or not (more := os.read(self._read, 1 << 20)):
                raise TimeoutError("the browser does not answer")
            self._rest += more
        one, self._rest = self._rest.split(b"\0", 1)
        return json.loads(one)

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
                self.requests.append(url)
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.problems.append(json.dumps(details))
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error", "text": text}}}:
                self.problems.append(text)

    # ---- what a person does

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState == 'complete'")

    def evaluate(self, script: str) -> Any:
        """Returns the value of JavaScript, of a promise when it is there."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 90) -> Any:
        """Waits until a script's value is true, and returns it."""
        until = time.monotonic() + seconds
        while not (found := self.evaluate(script)):
            if time.monotonic() > until:
                raise TimeoutError(f"{script} is {found!r} after {seconds} s; {self.problems}")
            time.sleep(0.02)
        return found

    def press(self, key: str, *, alt: bool = False) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            of: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": int(alt)}
            self.call("Input.dispatchKeyEvent", type=kind, **of)

    def middle(self, selector: str) -> tuple[float, float]:
        """The middle of an element, which is scrolled into sight."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getBoundingClientRect())"
        )
        return box[0], box[1]

    def click(self, selector: str) -> None:
        at = self.middle(selector)
        self._mouse("mousePressed", at)
        self.drop(at)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Presses the mouse at `start` and moves it to `end`, without letting go."""
        self._mouse("mousePressed", start)
        for part in (0.3, 0.6, 1.0):
            self._mouse("mouseMoved", (start[0] + part * (end[0] - start[0]), start[1] + part * (end[1] - start[1])))

    def drop(self, at: tuple[float, float]) -> None:
        """Lets go of the mouse."""
        self._mouse("mouseReleased", at)

    def _mouse(self, kind: str, at: tuple[float, float]) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", buttons=1, clickCount=1)

    def picture(self, path: Path) -> None:
        """Writes what is seen as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves the files of a folder on this machine, as `python -m http.server` does."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
