"""Takes the pictures of the page that the documents show: an answer that a killed server does not end.

    python -m tests.browser.pictures docs/images

The texts are in Inter where the machine has it (on Debian: fonts-inter).
"""

import sys
import tempfile
from pathlib import Path
from typing import Final

from corolla.local.options import StackOptions
from corolla.local.stack import Stack
from tests.browser.chromium import browser
from tests.browser.leading import PATIENCE_MS, ask, holder_of, process_of, wait_for_end, wait_for_text

BLOCKS: Final = "0:11,11:21,11:21,21:30"
SIZE: Final = {"width": 1360, "height": 850}


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as logs:
        options = StackOptions(blocks=BLOCKS, log_folder=Path(logs), restarts=False)
        with Stack(options) as stack, browser() as chromium:
            page = chromium.new_page(viewport=SIZE, device_scale_factor=1.5)
            page.goto(stack.page_url)
            ask(page, "What is the capital of France?", 60)
            wait_for_end(page)
            ask(page, "Write a short story about a lighthouse keeper and the sea.", 240)
            wait_for_text(page, 200)
            stack.kill(process_of(stack, holder_of(page, 15)))
            page.locator("#recoveries li").wait_for(timeout=PATIENCE_MS)
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.wait_for_timeout(600)  # what changes colour has done so
                page.screenshot(path=folder / f"page-{scheme}.png")
            wait_for_end(page)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
