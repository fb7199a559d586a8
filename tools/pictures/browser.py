"""The page that draws, and a headless Chromium that shows it.

The page has Grafana's components by `npm ci`, bundled with our own few files by esbuild; each is
made once. Chromium is led by the DevTools protocol over two pipes: nothing listens on a port.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.programs.cache import cache_root, cached, content_key
from harness.programs.nodejs import node, npm_ci
from harness.programs.prerequisites import PICTURE_TOOLS, require_tools
from harness.programs.processes import ClusterError, run
from harness.programs.progress import progress

FOLDER = Path(__file__).parent
PAGE = FOLDER / "page"
LOCK = tuple(FOLDER / name for name in ("package.json", "package-lock.json", ".npmrc"))
SECONDS = 120.0
WIDTH, HEIGHT = 1280, 800
"""Pixels of the smallest screen that a dashboard must be legible on."""
OPTIONS = (
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--lang=en-US",
    "--allow-file-access-from-files",
)


def page() -> Path:
    """Path of the page, made on first use (a minute; 270 MB stay in the cache, so that a change
    takes two seconds)."""
    key = content_key(*LOCK, PAGE)
    return cached(cache_root() / f"pictures-page-{key}", _bundle) / "index.html"


def _packages() -> Path:
    return (
        cached(cache_root() / f"pictures-packages-{content_key(*LOCK)}", _install) / "node_modules"
    )


def _install(folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in LOCK:
        shutil.copy(file, folder)
    with progress("Grafana's components"):
        npm_ci(folder)


def _bundle(folder: Path) -> None:
    packages = _packages()
    shutil.copytree(PAGE, folder)
    (folder / "node_modules").symlink_to(packages)
    options = [
        "--bundle",
        "--minify",
        "--jsx=transform",
        "--loader:.svg=text",
        '--define:process.env.NODE_ENV="production"',
        "--log-level=error",
        f"--outfile={folder / 'page.js'}",
    ]
    run(node(), packages / "esbuild" / "bin" / "esbuild", folder / "main.jsx", *options)
    (folder / "node_modules").unlink()


class Browser:
    """One tab."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._last = 0
        self._session = ""

    def open(self, page: Path) -> None:
        """Show a page of this machine, as wide as the smallest screen."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self._resize(HEIGHT)
        self._call("Page.enable")
        self._call("Page.navigate", url=page.as_uri())
        self.evaluate(
            "new Promise(go => document.readyState === 'complete' ? go() : "
            "addEventListener('load', go))"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited; an exception there raises ClusterError
        with its words."""
        done = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            raise ClusterError(f"the page failed: {done['exceptionDetails']}")
        return done["result"].get("value")

    def type_keys(self, text: str) -> None:
        """Press and release the key of each letter, in the element that has the focus."""
        for letter in text:
            self._call("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
            self._call("Input.dispatchKeyEvent", type="keyUp", key=letter)

    def picture(self, height: int) -> bytes:
        """The page's upper part of this height, as PNG."""
        self._resize(height)
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
        return base64.b64decode(
            self._call("Page.captureScreenshot", format="png", clip=clip)["data"]
        )

    def _resize(self, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=WIDTH,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        _write_all(self._write, json.dumps(message).encode() + b"\0")
        answer = next(one for one in self._messages() if one.get("id") == self._last)
        if "error" in answer:
            raise ClusterError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _messages(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + SECONDS
        while True:
            while b"\0" in self._rest:
                message, _, self._rest = self._rest.partition(b"\0")
                yield json.loads(message)
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise ClusterError(f"Chromium gave no answer within {SECONDS:.0f} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise ClusterError("Chromium has ended")
            self._rest += part


def _write_all(file: int, text: bytes) -> None:
    left = memoryview(text)
    while left:
        left = left[os.write(file, left) :]


@contextmanager
def browser(page: Path) -> Iterator[Browser]:
    """A Chromium that shows the page, and ends with the block."""
    require_tools(PICTURE_TOOLS)
    (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
    # processes of its own may write there for a moment after it has ended
    profiles = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with profiles as profile, tempfile.TemporaryFile() as log:
        command = ["chromium-headless-shell", *OPTIONS, f"--user-data-dir={profile}"]
        # the protocol is spoken on file descriptors 3 and 4
        shell = ["bash", "-c", f'exec "$@" 3<&{its_in} 4>&{its_out}', "bash", *command]
        process = subprocess.Popen(shell, pass_fds=(its_in, its_out), stdout=log, stderr=log)
        os.close(its_in)
        os.close(its_out)
        try:
            one = Browser(our_in, our_out)
            one.open(page)
            yield one
        finally:
            os.close(our_out)  # at which it ends
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(our_in)
