"""A real Chromium, driven over its debugging pipe: open a page, ask it, click and type as a person would."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

_LIMIT_S = 60.0


class Chromium:
    """One browser with one tab. Every wait has a limit; what the page throws is raised here."""

    def __init__(self, folder: Path) -> None:
        browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The pipe's ends are 3 and 4 by convention; a shell puts them there.
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        command = ["bash", "-c", script, "bash", browser, "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={folder}/profile"]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.requested: list[str] = []
        """Every address that the page asked for."""
        self.problems: list[str] = []
        """What the page complained about: exceptions, and what its policy forbade."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page."""
        self.requested.clear()
        self.problems.clear()
        self._call("Page.navigate", url=url)

    def prepare(self, script: str) -> None:
        """Run a script in every page from now on, before its own."""
        self._call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def ask(self, script: str) -> Any:
        """What an expression is worth on the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(json.dumps(found["exceptionDetails"])[:1000])
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Ask until the answer is true in the page's sense."""
        deadline = time.monotonic() + _LIMIT_S
        while not (found := self.ask(script)):
            assert time.monotonic() < deadline, (script, self.problems, self.ask("document.body.innerText")[:2000])
            time.sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        """The text of an element as it is shown."""
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        box = self.ask(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.scrollIntoView(); "
            "const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key."""
        text = {"Enter": "\r"}.get(key)
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text is not None and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **typed)

    def resize(self, width: int, height: int) -> None:
        """As on a screen of that size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)

    def scheme(self, name: str) -> None:
        """As with the system's light or dark scheme."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _LIMIT_S
        while True:
            while b"\0" not in self._buffer:
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"the browser did not answer {method}"
                if select.select([self._in], [], [], left_s)[0]:
                    data = os.read(self._in, 1 << 16)
                    assert data, "the browser has ended"
                    self._buffer += data
            line, _, self._buffer = self._buffer.partition(b"\0")
            said = json.loads(line)
            if said.get("id") == number:
                assert "error" not in said, (method, said["error"])
                return said["result"]
            self._note(said)

    def _note(self, said: dict[str, Any]) -> None:
        match said.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(said["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            case "Log.entryAdded" if said["params"]["entry"]["level"] == "error":
                self.problems.append(said["params"]["entry"]["text"])

    def close(self) -> None:
        """End the browser and what it started."""
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
