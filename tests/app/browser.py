"""The page as a user has it: the real command in a process of its own, and headless Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

pytest.importorskip("selenium")

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
NEEDED = "needs Chromium and its driver: apt-get install chromium chromium-driver"


@contextmanager
def served(*options: str, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Run ``llm2vec-gen app`` with some options; gives the page's address, and ends the command with Ctrl-C."""
    command = [sys.executable, "-m", "llm2vec_gen_st.cli", "app", *options]
    # Where a shell runs all this in the background, Ctrl-C is ignored unless it is asked for.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(env), preexec_fn=heard) as process:
        try:
            assert process.stdout is not None
            lines = (re.match(r"(http\S+): open it in a browser", line) for line in process.stdout)
            found = next(filter(None, lines), None)
            assert found is not None, f"the command ended with {process.wait()}"
            yield found[1]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


@contextmanager
def opened(url: str, width: int = 1280, height: int = 800) -> Iterator[Chrome]:
    """A headless browser on a page, which keeps a log of its requests."""
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars", "disable-background-networking"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    # With the path given, selenium does not look for a driver on the network.
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        driver.get(url)
        WebDriverWait(driver, 60).until(lambda _: len(driver.find_elements(By.TAG_NAME, "textarea")) == 2)
        yield driver
    finally:
        driver.quit()


def embed(driver: Chrome, queries: Sequence[str], seconds: float = 180) -> None:
    """Type queries into the two boxes, press the button, and wait for all results or for an error."""
    for box, query in zip(driver.find_elements(By.TAG_NAME, "textarea"), queries, strict=True):
        # The empty text too has to come from keys, or the page does not notice.
        box.send_keys("\ue009a\ue000", "\ue003")
        box.send_keys(query)
    # What was shown before must not be taken for what comes.
    driver.execute_script("document.querySelectorAll('.lvg-status').forEach(element => element.className = 'old')")
    button = next(button for button in driver.find_elements(By.TAG_NAME, "button") if button.text == "Embed")
    button.click()
    WebDriverWait(driver, seconds).until(lambda _: driver.find_elements(By.CSS_SELECTOR, ".lvg-done, .lvg-error"))
    time.sleep(0.2)  # until the browser has drawn it


def texts(driver: Chrome, selector: str) -> list[str]:
    """The text of every element of a kind, as it stands in the page."""
    found: list[str] = driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(element => element.textContent)", selector
    )
    return found
