"""A real headless Chromium, driven through ChromeDriver's W3C WebDriver protocol with the standard library."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


class Browser:
    """One window. ``close`` ends the browser and its driver."""

    def __init__(self, profile: Path) -> None:
        driver = shutil.which("chromedriver")
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        if driver is None or chromium is None:
            pytest.skip("no chromium and chromedriver on PATH: apt-get install chromium chromium-driver")
        port = free_port()
        self._base = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        options = {"binary": chromium, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        asked = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._wait_for_driver()
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._session = f"/session/{made['sessionId']}"

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                if self._call("GET", "/status", None)["ready"]:
                    return
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _call(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.loads(error.read())["value"]["message"]) from error

    def open(self, page: Path | str) -> None:
        url = page if isinstance(page, str) else page.as_uri()
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *given: Any) -> Any:
        """The value of a JavaScript function body."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(given)})

    def wait(self, condition: str, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.run(f"return !!({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}; {self.messages()}"
            time.sleep(0.05)

    def keys(self, selector: str, text: str) -> None:
        """Focus an element and type."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        actions = [
            step for key in text for step in ({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key})
        ]
        self._call("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def point(self, x: int, y: int) -> None:
        """Move the mouse."""
        move = {"type": "pointerMove", "duration": 0, "x": x, "y": y}
        actions = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._call("POST", f"{self._session}/actions", {"actions": [actions]})

    def devtools(self, command: str, given: dict[str, Any]) -> Any:
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": given})

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def messages(self) -> list[str]:
        """Errors on the console."""
        found = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        given = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            box = self.devtools("Page.getLayoutMetrics", {})["cssContentSize"]
            given["clip"] = {"x": 0, "y": 0, "width": box["width"], "height": min(box["height"], 8000), "scale": 1}
        path.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot", given)["data"]))

    def close(self) -> None:
        try:
            self._call("DELETE", self._session, None)
        finally:
            self._process.terminate()
            self._process.wait(10)
