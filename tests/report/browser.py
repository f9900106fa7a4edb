"""A headless Chromium that shows one page, spoken to over a pipe in the DevTools protocol."""
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")


def find():
    """Path of a browser, or None."""
    named = os.environ.get("BALLAST_BROWSER")
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """Opened on a page; every error that it logs is in `errors`, every address it asks for in
    `requests`."""

    def __init__(self, page, width=1200, height=900, timeout=90):
        self.errors, self.requests, self.next, self.buffer = [], [], 0, b""
        self.timeout, self.session = timeout, None
        self.folder = tempfile.mkdtemp(prefix="ballast-browser-")
        commands_in, self.out = os.pipe()
        self.answers, answers_out = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += ["--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={self.folder}"]
        self.process = subprocess.Popen(
            # Chromium reads commands from descriptor 3 and answers on 4.
            ["sh", "-c", f'exec "$@" 3<&{commands_in} 4>&{answers_out}', "sh", find(), *flags],
            pass_fds=(commands_in, answers_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_in)
        os.close(answers_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=f"file://{page}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        os.close(self.out)
        os.close(self.answers)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method, **parameters):
        self.next += 1
        message = {"id": self.next, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.timeout
        while True:
            answer = self._read(until)
            if answer.get("id") == self.next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._event(answer)

    def _read(self, until):
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self.answers, 1 << 16)
            if not part:
                raise RuntimeError("the browser ended")
            self.buffer += part
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def _event(self, event):
        method, data = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(data["exceptionDetails"])[:400])
        elif method == "Runtime.consoleAPICalled" and data["type"] in ("error", "assert"):
            self.errors.append(json.dumps(data["args"])[:400])
        elif method == "Log.entryAdded" and data["entry"]["level"] == "error":
            self.errors.append(data["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(data["request"]["url"])

    def value(self, expression):
        """Of a JavaScript expression, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, expression):
        until = time.monotonic() + self.timeout
        while not self.value(expression):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {expression}; errors: {self.errors}")
            time.sleep(0.1)

    def picture(self, path, whole=True):
        """PNG of the page."""
        import base64

        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))
