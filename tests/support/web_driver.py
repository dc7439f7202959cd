"""A browser without a screen, by the W3C's WebDriver protocol.

It is ``chromium`` with ``chromedriver``; where they are not installed, the Chromium of PyQt6-WebEngine with the driver
of chromedriver-py, in the environment that ``make browser`` makes or whose Python ``CAPIBARA_BROWSER_PYTHON`` names.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

__all__ = ["MISSING", "Browser", "browser"]

_WITH_PACKAGES = Path(
    os.environ.get("CAPIBARA_BROWSER_PYTHON") or Path(sys.prefix, "browser", "bin", "python")
)
_INSTALLED = all(shutil.which(name) for name in ("chromium", "chromedriver"))
MISSING = (
    None
    if _INSTALLED or _WITH_PACKAGES.exists()
    else "chromium and chromedriver not found (Debian: chromium, chromium-driver; elsewhere: make browser)"
)
_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One page of a browser."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def _post(self, path: str, **content: Any) -> Any:
        answer = self._http.post(f"/session/{self._session}/{path}", json=content)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """What a script returns."""
        return self._post("execute/sync", script=script, args=list(args))

    def element(self, selector: str) -> str:
        return self._post("element", using="css selector", value=selector)[_ELEMENT]

    def click(self, selector: str) -> None:
        self._post(f"element/{self.element(selector)}/click")

    def write(self, selector: str, text: str) -> None:
        """Type into a field; ``\\ue007`` is Enter, ``\\ue00c`` Escape."""
        self._post(f"element/{self.element(selector)}/value", text=text)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector)

    def wait(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, self.run("return document.body.innerText")
            time.sleep(0.02)
        return found

    def size(self, width: int, height: int) -> None:
        """The size of the page, in its own pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._post("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)

    def picture(self, path: Path) -> None:
        answer = self._http.get(f"/session/{self._session}/screenshot")
        path.write_bytes(base64.b64decode(answer.json()["value"]))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def _started(*command: object) -> Iterator[None]:
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _answers(http: httpx.Client, url: str) -> httpx.Response:
    """What a process that has just been started answers once it listens."""
    end = time.monotonic() + 30
    while True:
        with contextlib.suppress(httpx.ConnectError):
            answer = http.get(url)
            if answer.status_code == 200:
                return answer
        assert time.monotonic() < end, url
        time.sleep(0.05)


@contextlib.contextmanager
def browser(folder: Path, *arguments: str) -> Iterator[Browser]:
    """A browser with a profile of its own in a folder."""
    assert MISSING is None, MISSING
    with contextlib.ExitStack() as started:
        port, arguments = _free_port(), (*_ARGUMENTS, *arguments)
        http = started.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60))
        driver = "chromedriver"
        options: dict[str, Any] = {"args": ["--headless", f"--user-data-dir={folder}", *arguments]}
        if not _INSTALLED:
            path = "import chromedriver_py; print(chromedriver_py.binary_path)"
            driver = subprocess.check_output([_WITH_PACKAGES, "-c", path], text=True).strip()
            host, debugged = Path(__file__).with_name("qt_browser.py"), _free_port()
            started.enter_context(_started(_WITH_PACKAGES, host, debugged, *arguments))
            _answers(http, f"http://127.0.0.1:{debugged}/json/version")
            options = {"debuggerAddress": f"127.0.0.1:{debugged}"}  # its profile is in memory
        started.enter_context(_started(driver, f"--port={port}"))
        assert _answers(http, "/status").json()["value"]["ready"]
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        made = http.post("/session", json={"capabilities": wanted})
        assert made.status_code == 200, made.text
        session = made.json()["value"]["sessionId"]
        started.callback(http.delete, f"/session/{session}")
        yield Browser(http, session)
