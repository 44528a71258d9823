"""A headless Chromium that a test speaks to over a pipe: it opens pages, runs their script, presses keys, and tells
what went wrong."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.support.pace import patience


class Browser:
    """`with Browser(folder) as browser`: one tab. `complaints`: errors of pages, what their policy has blocked
    included."""

    def __init__(self, folder: Path, width: int = 1200, dark: bool = False):
        found = shutil.which("chromium") or shutil.which("chromium-browser")
        assert found, "chromium is missing: install Debian's package chromium"
        self._number, self.complaints = 0, list[str]()
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        argv = [
            found,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
        ]
        argv += [f"--window-size={width},900", *(["--force-prefers-color-scheme=dark"] if dark else [])]
        # Chromium reads commands at descriptor 3 and answers at 4.
        shell = ["bash", "-c", f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"', "chromium", *argv]
        self._process = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._session = b"", None

    def __enter__(self) -> "Browser":
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *exc) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, script: str):
        """Return the value of an expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str):
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + patience(20)
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"{script} did not become true: {self.run('document.body.innerText')}"
            time.sleep(0.1)
        return value

    def press(self, key: str) -> None:
        """Press Tab or Enter, where the focus is."""
        code = {"Tab": 9, "Enter": 13}[key]
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code, **({"text": "\r"} if key == "Enter" else {})}
        self._call("Input.dispatchKeyEvent", type="keyDown", **named)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self) -> str:
        """Return the page as a PNG in base64."""
        return self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]

    def _call(self, method: str, **params) -> dict:
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])
            elif message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            assert data, "chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)
