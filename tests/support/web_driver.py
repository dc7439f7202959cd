"""A browser without a screen, by the W3C's WebDriver protocol."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

__all__ = ["MISSING", "Browser", "browser"]

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
_ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
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
        self._post("window/rect", width=width, height=height)

    def picture(self, path: Path) -> None:
        answer = self._http.get(f"/session/{self._session}/screenshot")
        path.write_bytes(base64.b64decode(answer.json()["value"]))


@contextlib.contextmanager
def browser(folder: Path, *arguments: str) -> Iterator[Browser]:
    """A browser with a profile of its own in a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            end = time.monotonic() + 30
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    if http.get("/status").json()["value"]["ready"]:
                        break
                assert time.monotonic() < end
                time.sleep(0.05)
            options = {"args": [*_ARGUMENTS, f"--user-data-dir={folder}", *arguments]}
            wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
            made = http.post("/session", json={"capabilities": wanted})
            assert made.status_code == 200, made.text
            session = made.json()["value"]["sessionId"]
            yield Browser(http, session)
            http.delete(f"/session/{session}")
    finally:
        driver.kill()
        driver.wait()
