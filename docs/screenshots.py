"""Makes the pictures of README.md and docs/monitoring.md: real runs, photographed in a real browser.

    python docs/screenshots.py

Needs the extra ``view``, selenium, scikit-learn, and Debian's chromium and chromium-driver. Takes two minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from paceline.observe import read_log
from paceline.page import write_report
from paceline.page.server import LivePage

HERE = Path(__file__).parent
IMAGES = HERE / "images"
DIGITS = HERE.parent / "examples" / "digits.py"


def train(runs: Path, pace: str, epochs: int) -> subprocess.Popen[bytes]:
    """Four different machines, emulated, learn digits."""
    machines = [
        "-n",
        "4",
        "--emulate",
        "1,1,2,4",
        "--sample-ms",
        "6",
    ]  # steps of 0.3 s and more: short rounds beside them
    command = [sys.executable, "-m", "paceline.cli", "run", "-q", *machines, "--pace", pace]
    return subprocess.Popen([*command, "--name", pace, "--output-dir", str(runs), str(DIGITS), "--epochs", str(epochs)])


def folder_of(runs: Path, name: str) -> Path:
    """The run's folder, once its log is there."""
    while not (found := list(runs.glob(f"*-{name}/events.jsonl"))):
        time.sleep(0.1)
    return found[0].parent


@contextmanager
def browser(height: int) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size=1280,{height}"):
        options.add_argument(flag)
    options.add_argument("--hide-scrollbars")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def photograph(address: str, name: str, *, height: int, dark: bool = False, until: str = "true") -> None:
    """A picture of the page as ``images/<name>.png``, once the JavaScript expression ``until`` is true."""
    with browser(height) as driver:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        driver.get(address)
        while not driver.execute_script(f"return {until}"):
            time.sleep(0.1)
        time.sleep(1.0)
        IMAGES.mkdir(exist_ok=True)
        driver.save_screenshot(str(IMAGES / f"{name}.png"))
    print(f"wrote {IMAGES / name}.png", file=sys.stderr)


FRONT = {"equal": "Equal shares, as DDP deals them", "adaptive": "Shares that follow each machine's speed"}
STYLE = (
    "body{font:20px system-ui;margin:24px} h1{font-size:28px;margin:16px 0 4px} p{margin:0 0 12px} img{width:100%25}"
)
"""Of the page that the README's picture is taken of, as part of an address."""


def photograph_front(reports: dict[str, str]) -> None:
    """The README's picture: what each of the reports says first, and its panel of the last steps."""
    parts = []
    with browser(1100) as driver:
        for name, address in reports.items():
            driver.get(address)
            while driver.execute_script("return document.documentElement.dataset.drawn !== 'yes'"):
                time.sleep(0.1)
            time.sleep(1.0)
            said = driver.find_element("css selector", "#verdict .lead").text
            panel = driver.find_element("id", "timeline").screenshot_as_base64
            parts.append(f"<h1>{FRONT[name]}</h1><p>{said}</p><img src='data:image/png;base64,{panel}'>")
        driver.get(f"data:text/html;charset=utf-8,<!doctype html><style>{STYLE}</style><body></body>")
        driver.execute_script("document.body.innerHTML = arguments[0]", "".join(parts))
        time.sleep(1.0)
        height = driver.execute_script("return Math.ceil(document.body.getBoundingClientRect().bottom) + 24")
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        driver.save_screenshot(str(IMAGES / "front.png"))
    print(f"wrote {IMAGES / 'front'}.png", file=sys.stderr)


def main() -> None:
    drawn = "document.documentElement.dataset.drawn === 'yes'"
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place)
        train(runs, "equal", 3).wait()
        running = train(runs, "adaptive", 12)
        page = LivePage(folder_of(runs, "adaptive"))
        photograph(page.url, "watch", height=1640, until="document.body.innerText.includes('step 6')")
        running.wait()
        page.close()
        adaptive, equal = folder_of(runs, "adaptive"), folder_of(runs, "equal")
        report = write_report(read_log(equal)).as_uri()
        photograph(report, "report", height=1640, until=drawn)
        fast = write_report(read_log(adaptive)).as_uri()
        photograph(fast, "report-dark", height=1640, dark=True, until=drawn)
        photograph_front({"equal": report, "adaptive": fast})
        comparison = runs / "compare.html"
        command = [
            sys.executable,
            "-m",
            "paceline.cli",
            "report",
            str(equal),
            str(adaptive),
            "-o",
            str(comparison),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        photograph(comparison.as_uri(), "compare", height=1130, until=drawn)


if __name__ == "__main__":
    main()
