"""A page in headless Chromium, driven over the browser's own debugging pipe: no driver, no port, no library."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1300,1000")
SECONDS_TO_ANSWER = 60.0


class Page:
    """One open page: what it logs, and the values of expressions in it."""

    def __init__(self, send_fd: int, receive_fd: int) -> None:
        self.send_fd, self.receive_fd = send_fd, receive_fd
        self.number = 0
        self.rest = b""
        self.session: str | None = None
        self.problems: list[str] = []
        """Errors on the console and exceptions that nobody caught."""

    def open(self, file: Path) -> float:
        """Load a file; return the seconds until its table was drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        start = time.perf_counter()
        self.call("Page.navigate", url=file.as_uri())
        while not self.value("document.querySelectorAll('.body .row').length"):
            assert time.perf_counter() - start < SECONDS_TO_ANSWER, self.problems
            time.sleep(0.01)
        return time.perf_counter() - start

    def value(self, expression: str) -> Any:
        """Evaluate an expression; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and wait for its answer; note problems that are reported meanwhile."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.send_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        is_error = params.get("entry", {}).get("level") == "error" or params.get("type") in ("error", "warning")
        if event.get("method") == "Runtime.exceptionThrown" or is_error:
            self.problems.append(json.dumps(params)[:500])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.receive_fd], [], [], SECONDS_TO_ANSWER)
            assert ready, "the browser does not answer"
            self.rest += os.read(self.receive_fd, 1 << 20)
        message, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start Chromium and end it."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()

    def use_pipes() -> None:  # the browser reads from descriptor 3 and writes to 4
        read, write = os.dup(to_browser[0]), os.dup(from_browser[1])
        os.dup2(read, 3)
        os.dup2(write, 4)

    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        command,
        preexec_fn=use_pipes,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        process.kill()
        process.wait()
        for end in (*to_browser, *from_browser):
            os.close(end)
