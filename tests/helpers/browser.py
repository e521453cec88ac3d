"""A headless Chromium, driven by its DevTools protocol over a pipe: one process for many pages."""

import base64
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip


def find_browser() -> str | None:
    """The path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """A context manager. `ask` and `picture` refer to the open page as it looks now."""

    def __init__(self, executable: str, profile: Path) -> None:
        from_us, self._commands = os.pipe()
        self._answers, to_us = os.pipe()
        # Chromium reads descriptor 3 and writes 4.
        script = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
        shell = ("bash", "-c", script)  # other shells know descriptors of one digit only
        self._process = subprocess.Popen(
            [*shell, executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(from_us)
        os.close(to_us)
        self._pending, self._count, self._session = b"", 0, ""
        try:
            self._attach()
        except BaseException:
            self._stop()
            raise

    def _attach(self) -> None:
        (target,) = (t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")

    def open(self, page: Path) -> None:
        """Go to a page, and wait until it is there."""
        self._call("Page.navigate", url=page.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def look(self, *, width: int, dark: bool = False) -> None:
        """Set the width of the screen in CSS pixels, and the colour scheme; it is 900 high."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def picture(self, file: Path, *, height: int | None = None) -> None:
        """Write a PNG of the page's first `height` pixels, by default of the whole page."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        command: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self._count:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        found: dict[str, Any] = message["result"]
        return found

    def _next(self) -> dict[str, Any]:
        """The next message: an answer or an event."""
        while b"\0" not in self._pending:
            read = os.read(self._answers, 1 << 20)
            if not read:
                raise RuntimeError("the browser is gone")
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        os.close(self._commands)
        os.close(self._answers)
        try:
            self._process.wait(5)  # it leaves when its pipe is closed
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def problems(browser: Browser) -> list[str]:
    """Problems of the open page. On a phone, boxes of class `wide` may scroll sideways."""
    found: list[str] = browser.ask(f"({_CHECKS})()")
    return found


_CHECKS = r"""() => {
  const found = new Set(), root = document.documentElement, isWide = root.clientWidth > 1000;
  const all = s => [...document.querySelectorAll(s)];
  if (root.scrollWidth > root.clientWidth) found.add(`the page slides sideways: ${root.scrollWidth}`);
  for (const box of all(isWide ? ".scroll" : ".scroll:not(.wide)"))
    if (box.scrollWidth > box.clientWidth) found.add(`a box slides sideways: ${box.innerText.slice(0, 60)}`);
  const text = document.body.innerText;
  for (const raw of text.match(/\bNone\b|\[\]|\bnan\b|\bundefined\b|2\^/g) ?? []) found.add(`raw text: ${raw}`);
  const titles = [...all("[title]").map(x => x.title), ...all("svg :not(svg) > title").map(x => x.textContent)];
  for (const value of titles.flatMap(x => x.match(/(?<![\w.])\d+\.\d+/g) ?? []))
    if (!text.includes(value)) found.add(`a value in a title only: ${value}`);
  for (const svg of all("svg")) {
    const frame = svg.getBoundingClientRect();
    for (const label of svg.querySelectorAll("text")) {
      const box = label.getBoundingClientRect();
      const isCut = box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
      if (isCut && label.textContent) found.add(`a label is cut: ${label.textContent}`);
    }
  }
  const light = color => {
    const [r, g, b] = color.match(/[\d.]+/g).map(x => x / 255);
    const linear = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  for (const x of all("body *")) {
    const own = [...x.childNodes].filter(n => n.nodeType === 3 && n.data.trim()).map(n => n.data.trim())[0];
    if (!own || x.closest("svg, script, style") || !x.offsetParent) continue;
    const clear = y => /rgba\(.*, 0\)|transparent/.test(getComputedStyle(y).backgroundColor);
    let behind = x;
    while (behind && clear(behind)) behind = behind.parentElement;
    const back = behind ? getComputedStyle(behind).backgroundColor : "rgb(255, 255, 255)";
    const [a, b] = [getComputedStyle(x).color, back];
    const [dark, bright] = [light(a), light(b)].sort((p, q) => p - q);
    if ((bright + 0.05) / (dark + 0.05) < 4.5) found.add(`hard to read: ${own.slice(0, 40)} (${a} on ${b})`);
  }
  return [...found];
}"""
