"""Drive a headless Chromium through the WebDriver protocol, with the commands that the tests of report pages need."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MISSING = (
    "Chromium and its driver are not on the PATH; install them (on Debian: apt-get install chromium chromium-driver)"
)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def find_chromium() -> tuple[str, str] | None:
    """Return the paths of the browser and of its driver, or None if one of them is not on the PATH."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One browser window, used as a context manager."""

    def __init__(self, folder: Path) -> None:
        paths = find_chromium()
        if paths is None:
            raise RuntimeError(MISSING)
        binary, driver = paths
        self.process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self.root = f"http://127.0.0.1:{self._port()}"
            options = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={folder}"]}
            capabilities = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.root += f"/session/{session['sessionId']}"

    def _port(self) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "started successfully on port" in line:
                return int(line.rsplit("port", 1)[1].strip(" .\n"))
        raise RuntimeError("chromedriver did not print its port")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self.process.terminate()
            self.process.wait(10)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self.root + path, data, {"Content-Type": "application/json"} if data else {}, method=method
        )
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with no_proxy.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {json.load(error)['value']['message']}") from None

    def open(self, path: Path) -> None:
        self._call("POST", "/url", {"url": path.resolve().as_uri()})

    def visit(self, path: Path) -> None:
        """Open a page as a first-time visitor: light theme, no motion, wide window, empty local storage."""
        self.resize(1280, 900)
        self.prefer(color_scheme="light", reduced_motion="reduce")
        self.open(path)
        self.run("localStorage.clear()")
        self.open(path)
        self.until("!document.querySelector('.chart > script') || document.documentElement.classList.contains('drawn')")
        self.settle()

    def run(self, script: str, *arguments: object) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments: object) -> Any:
        return self._call("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def protocol(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int, *, density: float = 1.0, mobile: bool = False) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": density, "mobile": mobile}
        self.protocol("Emulation.setDeviceMetricsOverride", shape)

    def prefer(self, **features: str) -> None:
        """Set media features, for example color_scheme="dark"."""
        pairs = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.protocol("Emulation.setEmulatedMedia", {"features": pairs})

    def find(self, selector: str) -> dict[str, str]:
        return self._call("POST", "/element", {"using": "css selector", "value": selector})

    def drag(self, selector: str, dx: int, dy: int) -> None:
        """Press in the middle of the element, move, wait until no inertia is left, and release."""
        here = {"type": "pointerMove", "duration": 0, "origin": self.find(selector), "x": 0, "y": 0}
        steps = [
            here,
            {"type": "pointerDown", "button": 0},
            {"type": "pointerMove", "duration": 80, "origin": "pointer", "x": dx, "y": dy},
            {"type": "pause", "duration": 100},
            {"type": "pointerUp", "button": 0},
        ]
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": steps})

    def hover(self, selector: str, x: int = 0, y: int = 0) -> None:
        move = {"type": "pointerMove", "duration": 0, "origin": self.find(selector), "x": x, "y": y}
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]})

    def press(self, key: str) -> None:
        """Send one key to the focused element."""
        steps = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._act({"type": "key", "id": "keyboard", "actions": steps})

    def click(self, selector: str) -> None:
        element = next(iter(self.find(selector).values()))
        self._call("POST", f"/element/{element}/click", {})

    def _act(self, source: dict[str, Any]) -> None:
        self._call("POST", "/actions", {"actions": [source]})

    def settle(self) -> None:
        """Wait until two frames have been drawn."""
        self.run_async(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(true)))"
        )

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. A page learns about changed media features with a delay."""
        self.run_async(
            f"const done = arguments[0]; const poll = () => ({condition}) ? done(true) : setTimeout(poll, 20); poll()"
        )

    def console(self) -> list[str]:
        """Return the warnings and errors that the page logged since the last call."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def pdf(self) -> bytes:
        return base64.b64decode(self._call("POST", "/print", {}))
