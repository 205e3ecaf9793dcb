"""Write docs/pictures of the running stack and the newest report: `make pictures`, after `make up` and `make loadtest`.

The page needs the systems `chat` and `embedding`. Each picture exists twice: README.md shows the one of the reader's
colour scheme.
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from triton_transformers.settings import ROOT, Settings

FOLDER = ROOT / "docs/pictures"
SCHEMES = ("light", "dark")
WIDTH, SCALE = 960, 1.5
MAX_BYTES = 300_000
ANSWER_S = 120


def browser() -> WebDriver:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"):
        options.add_argument(argument)
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


def command(chrome: WebDriver, name: str, **arguments: object) -> dict:
    return chrome.execute_cdp_cmd(name, arguments)


def take(chrome: WebDriver, name: str, end: str) -> None:
    """Write the page from its top down to the end of the element that the selector names."""
    script = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom + window.scrollY"
    height = chrome.execute_script(script, end) + 16
    for scheme in SCHEMES:
        command(chrome, "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        chrome.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
        shot = command(chrome, "Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB").quantize(128)
        path = FOLDER / f"{name}-{scheme}.png"
        image.save(path, optimize=True)
        if path.stat().st_size > MAX_BYTES:
            sys.exit(f"{path.relative_to(ROOT)} has {path.stat().st_size} bytes, more than {MAX_BYTES}")
        print(f"{path.relative_to(ROOT)}  {image.width} x {image.height}, {path.stat().st_size} bytes")


def send(chrome: WebDriver, system: str, **fields: str) -> None:
    """Fill in fields of the system's box, send it, and wait for the whole answer."""
    form = chrome.find_element(By.CSS_SELECTOR, f"[data-system={system}] form")
    for name, text in fields.items():
        field = form.find_element(By.NAME, name)
        field.clear()
        field.send_keys(text)
    form.find_element(By.CSS_SELECTOR, "[type=submit]").click()
    answer = form.find_element(By.CSS_SELECTOR, ".answer")
    wait(chrome, lambda: answer.text and not answer.get_attribute("aria-busy"))


def wait(chrome: WebDriver, condition: Callable[[], object]) -> None:
    WebDriverWait(chrome, ANSWER_S).until(lambda _: condition())


def main() -> None:
    settings = Settings.load()
    report = Path(settings.reports, "latest/report.html").resolve()
    if not report.exists():
        sys.exit(f"There is no {report}: run `make loadtest` first.")
    FOLDER.mkdir(exist_ok=True)
    chrome = browser()
    try:
        size = {"width": WIDTH, "height": 1000, "deviceScaleFactor": SCALE, "mobile": False}
        command(chrome, "Emulation.setDeviceMetricsOverride", **size)
        chrome.get(settings.url("GATEWAY_PORT"))
        send(chrome, "embedding")
        send(chrome, "chat", prompt="What is the capital of France?")
        # Prometheus has seen the chat.
        wait(chrome, lambda: chrome.find_element(By.CSS_SELECTOR, "[data-system=chat] dd").text not in ("0", "–"))
        take(chrome, "page", "article:last-of-type")
        chrome.get(report.as_uri())
        take(chrome, "report", "main > picture")
    finally:
        chrome.quit()


if __name__ == "__main__":
    main()
