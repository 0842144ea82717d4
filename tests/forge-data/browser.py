"""Headless Chromium over a pipe (the DevTools protocol): no driver, no port."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SECONDS = 60


class Browser:
    """One page of one browser; `errors` are messages of its console, `requests` what it loaded."""

    def __init__(self):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self._profile = tempfile.mkdtemp(prefix="forge-browser-")
        # A browser reads from descriptor 3 and writes to 4; a shell puts them there, whatever they are here.
        flags = [f"--user-data-dir={self._profile}", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", "--disable-background-networking", "--no-first-run", "about:blank"]
        # Duplicated to high numbers first, so that neither is overwritten before it was moved.
        moved = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "bash", str(to_browser), str(from_browser), CHROMIUM, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._number, self._session = b"", 0, None
        self.errors, self.requests = [], []
        (page, *_) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send a command and return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            got = self._next()
            if got.get("id") == self._number:
                if "error" in got:
                    raise RuntimeError(f"{method}: {got['error']}")
                return got["result"]
            self._note(got)

    def open(self, path, *, width=1440, height=1000, fragment="", dark=False):
        """Open a file in a window of a size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        )
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"file://{path}{fragment}")
        self.run("new Promise(done => { const go = () => requestAnimationFrame(() => setTimeout(done, 150));"
                 " document.readyState === 'complete' ? go() : addEventListener('load', go); })")  # fmt: skip

    def run(self, expression):
        """Return the value of a JavaScript expression; wait for a promise."""
        got = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in got:
            raise RuntimeError(got["exceptionDetails"])
        return got["result"].get("value")

    def press(self, key, text=""):
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **({"text": text} if text and kind == "keyDown" else {}))
        self.run("new Promise(done => setTimeout(done, 30))")

    def screenshot(self):
        """Return the window as PNG, in base 64."""
        return self.call("Page.captureScreenshot")["data"]

    def close(self):
        """End the browser and remove its profile."""
        try:
            self._session = None
            self.call("Browser.close")
        except (OSError, RuntimeError):
            self._process.kill()
        self._process.wait(_SECONDS)
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _next(self):
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError("the browser is gone")
            self._rest += more
        one, _, self._rest = self._rest.partition(b"\0")
        return json.loads(one)

    def _note(self, event):
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(
                    about["exceptionDetails"].get("exception", about["exceptionDetails"]).get("description", "?")
                )
            case "Runtime.consoleAPICalled" if about["type"] in {"error", "warning", "assert"}:
                self.errors.append(str(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in {"error", "warning"}:
                self.errors.append(about["entry"]["text"])
            case "Network.requestWillBeSent":
                url = about["request"]["url"]
                if about.get("type") != "Document" and not url.startswith("data:"):
                    self.requests.append(url)


if __name__ == "__main__":
    # python browser.py page.html out.png [width] [height] [#fragment] [dark]
    import base64
    from pathlib import Path

    browser = Browser()
    try:
        words = [*sys.argv[3:], "", "", "", ""]
        browser.open(
            Path(sys.argv[1]).absolute(),
            width=int(words[0] or 1440),
            height=int(words[1] or 1000),
            fragment=words[2],
            dark=bool(words[3]),
        )
        Path(sys.argv[2]).write_bytes(base64.b64decode(browser.screenshot()))
        sys.stdout.write(f"console: {browser.errors}; requests: {browser.requests}\n")
    finally:
        browser.close()
