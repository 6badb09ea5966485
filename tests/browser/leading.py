"""What somebody does at the page, and what can be seen there."""

from typing import Any, Final

from corolla.http.placement_facts import name_of
from corolla.local.stack import Stack

PATIENCE_MS: Final = 120_000
ANSWER: Final = "#log article.assistant:last-of-type .text"


def ask(page: Any, text: str, max_tokens: int = 40) -> None:
    """Writes a message and sends it; the answer comes."""
    page.get_by_label("Tokens").fill(str(max_tokens))
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def wait_for_text(page: Any, num_chars: int) -> None:
    """Returns when so much of the newest answer is there."""
    condition = f"() => document.querySelector('{ANSWER}')?.textContent.length >= {num_chars}"
    page.wait_for_function(condition, timeout=PATIENCE_MS)


def is_answering(page: Any) -> bool:
    return bool(page.locator("#log").get_attribute("aria-busy") == "true")


def wait_for_end(page: Any) -> str:
    """Returns the newest answer, when none is under way."""
    page.locator("#log[aria-busy=false]").wait_for(timeout=PATIENCE_MS)
    return str(page.locator(ANSWER).text_content())


def holder_of(page: Any, block: int) -> str:
    """The servers that hold a block, as the page calls them."""
    return str(page.locator(".block").nth(block).get_attribute("data-holder"))


def process_of(stack: Stack, name: str) -> str:
    """The process that the page calls so. Raises LookupError: there is none."""
    placement = stack.placement()
    for placed in placement.servers if placement is not None else ():
        if name_of(placed.server.server_id) == name:
            return next(each.name for each in stack.servers if each.address == placed.server.address)
    raise LookupError(name)
