"""Makes the README's picture of the page: ``python -m tests.app.screenshot docs/app.png``.

Runs ``llm2vec-gen app`` with the built-in model and the demonstration's passages, and looks at it in headless Chromium.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from .browser import CHROMIUM, DRIVER, NEEDED, embed, opened, served

QUERIES = ("Why is the sky blue?", "How do bees make honey?")


def main(path: Path) -> None:
    """Write the picture of the whole page."""
    if CHROMIUM is None or DRIVER is None:
        raise SystemExit(f"The picture {NEEDED}.")
    with served() as url, opened(url) as driver:
        embed(driver, QUERIES)
        driver.execute_script("document.activeElement.blur()")
        size = driver.execute_script(
            "return {width: window.innerWidth, "
            "height: Math.ceil(document.querySelector('.lvg-columns').getBoundingClientRect().bottom) + 24}"
        )
        picture = driver.execute_cdp_cmd(
            "Page.captureScreenshot",
            {"format": "png", "captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "scale": 1, **size}},
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(picture["data"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
