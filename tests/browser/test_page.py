"""The page in a real Chromium, of a stack of real processes with the demo model."""

import json
import signal
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from corolla.client.api.keys import NewKey
from corolla.local.options import StackOptions
from corolla.local.stack import Stack
from tests.browser.chromium import browser, package
from tests.browser.leading import PATIENCE_MS, ask, holder_of, is_answering, process_of, wait_for_end, wait_for_text

pytestmark = [pytest.mark.full, pytest.mark.model, pytest.mark.timeout(600)]

STORY = "Write a short story about a lighthouse keeper and the sea."
NUM_TOKENS = 160
WIDE, PHONE = {"width": 1360, "height": 850}, {"width": 390, "height": 844}
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
NUM_BLOCKS, LAST = 30, 29


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("page")
    with Stack(StackOptions(blocks="0:14,14:30,14:30", log_folder=folder)) as stack:
        yield stack


@pytest.fixture
def page(chromium: Any, stack: Stack) -> Iterator[Any]:
    """The page, which nothing has gone wrong on in the end."""
    context = chromium.new_context(viewport=WIDE)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.extend([message.text] if message.type == "error" else []))
    page.goto(stack.page_url)
    page.get_by_text("live", exact=True).wait_for(timeout=PATIENCE_MS)
    yield page
    context.close()
    # Browsers log replies that are refusals, or missing, by themselves.
    assert [each for each in problems if not each.startswith("Failed to load resource")] == []


Replies = Sequence[Callable[[Any], None]]


def cut(route: Any) -> None:
    """The connection breaks in the middle of the stream."""
    reply = route.fetch(timeout=PATIENCE_MS)
    events = reply.body().split(b"\n\n")
    route.fulfill(response=reply, body=b"\n\n".join(events[: len(events) // 2]) + b"\n\n")


def refusal(status: int, code: str, **headers: str) -> Callable[[Any], None]:
    """Returns a reply that is broken."""
    error = {"message": "not now", "type": "server_error", "param": None, "code": code}

    def refuse(route: Any) -> None:
        route.fulfill(status=status, json={"error": error}, headers=headers)

    return refuse


def reply_to_chats(page: Any, replies: Replies) -> None:
    """The next requests for answers get these replies; later ones get what the service says."""
    rest = iter(replies)
    page.route("**/v1/chat/completions", lambda route: next(rest, lambda it: it.continue_())(route))


def undisturbed(stack: Stack, text: str, max_tokens: int) -> str:
    """What any caller gets for a message."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"{stack.page_url}v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def barriers(page: Any) -> list[Any]:
    """What axe finds that keeps somebody out."""
    axe = Path(package("axe_playwright_python.base").__file__).with_name("axe.min.js")
    page.evaluate(axe.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]


def test_a_chat_has_sessions_that_stay_in_the_tab(page: Any, stack: Stack) -> None:
    question = "What is the capital of France?"
    ask(page, question)
    assert wait_for_end(page) == undisturbed(stack, question, 40)
    ask(page, "And of Italy?")
    assert "Rome" in wait_for_end(page)  # the first question alone says what is asked for
    assert page.locator("#log article").count() == 4
    page.get_by_role("button", name="New", exact=True).click()
    assert page.locator("#log article").count() == 0
    ask(page, "Who are you?")
    other = wait_for_end(page)
    page.reload()
    sessions = page.locator(".session")
    assert sessions.all_text_contents() == ["Who are you?", question]
    assert page.locator("#log article .text").all_text_contents() == ["Who are you?", other]
    sessions.nth(1).click()
    ask(page, "And of Spain?")
    assert "Madrid" in wait_for_end(page)
    page.get_by_role("button", name=f"End the session {question}").click()
    assert page.locator(".session").all_text_contents() == ["Who are you?"]
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


def begin_session_and_end_it(page: Any, stack: Stack) -> None:
    """The page shows a turn of a session that the service does not have any more."""
    with page.expect_response("**/v1/sessions") as made:
        ask(page, "What is the capital of France?")
    wait_for_end(page)
    session = made.value.json()["id"]
    ended = urllib.request.Request(f"{stack.page_url}v1/sessions/{session}", method="DELETE")
    with urllib.request.urlopen(ended, timeout=60) as reply:
        assert reply.status == 200


def test_a_session_that_has_expired_is_made_anew(page: Any, stack: Stack) -> None:
    begin_session_and_end_it(page, stack)
    ask(page, "And of Italy?")
    assert "Rome" in wait_for_end(page)


def test_nothing_is_forgotten_when_the_first_answer_of_a_session_made_anew_is_stopped(page: Any, stack: Stack) -> None:
    begin_session_and_end_it(page, stack)
    with page.expect_response("**/v1/sessions") as made:
        ask(page, STORY, 400)
    wait_for_text(page, 20)
    unused = f"{stack.page_url}v1/sessions/{made.value.json()['id']}"
    with page.expect_response(lambda reply: reply.url == unused and reply.ok, timeout=PATIENCE_MS):
        page.keyboard.press("Escape")
        page.get_by_text("stopped; the session goes on").wait_for(timeout=PATIENCE_MS)
        ask(page, "And of Italy?")
        assert "Rome" in wait_for_end(page)


def test_a_killed_servers_blocks_change_hands_while_the_answer_goes_on(page: Any, stack: Stack) -> None:
    expected = undisturbed(stack, STORY, NUM_TOKENS)
    ask(page, STORY, NUM_TOKENS)
    wait_for_text(page, 60)
    lost = holder_of(page, LAST)
    stack.kill(process_of(stack, lost))
    changed = f"() => document.querySelectorAll('.block')[{LAST}].dataset.holder !== '{lost}'"
    page.wait_for_function(changed, timeout=PATIENCE_MS)
    found = holder_of(page, LAST)
    page.locator("#recoveries li", has_text=f"{lost} was lost").wait_for(timeout=PATIENCE_MS)
    assert is_answering(page)
    recovery = page.locator("#recoveries li").first.text_content()
    assert f"{lost} was lost: {found} took blocks 14\u201329." in recovery
    assert {holder_of(page, block) for block in range(14, NUM_BLOCKS)} == {found}
    assert wait_for_end(page) == expected
    assert "1 recovery" in page.locator(".assistant .note").last.text_content()
    # The stack starts the server again, as another one.
    page.get_by_text("1 more could take over").wait_for(timeout=PATIENCE_MS)
    assert lost not in page.locator("#server-rows").text_content()


def test_an_answer_outlives_its_client_service(page: Any, stack: Stack) -> None:
    expected = undisturbed(stack, STORY, NUM_TOKENS)
    ask(page, STORY, NUM_TOKENS)
    wait_for_text(page, 60)
    stack.kill("client", signal.SIGKILL)
    page.get_by_text("connecting again").wait_for(timeout=PATIENCE_MS)
    assert is_answering(page)
    assert wait_for_end(page) == expected
    page.get_by_text("live", exact=True).wait_for(timeout=PATIENCE_MS)


def test_the_rest_of_an_answer_is_waited_for(page: Any, stack: Stack) -> None:
    waits = refusal(429, "queue_full", **{"retry-after": "1"}), refusal(503, "no_chain", **{"retry-after": "2"})
    reply_to_chats(page, [cut, *waits])
    ask(page, STORY)
    assert wait_for_end(page) == undisturbed(stack, STORY, 40)
    # An answer that has not begun is refused at once.
    reply_to_chats(page, waits)
    ask(page, "Who are you?")
    page.get_by_role("alert").get_by_text("not now.").wait_for(timeout=PATIENCE_MS)


def test_an_answer_whose_session_is_lost_with_its_stream_begins_anew(page: Any, stack: Stack) -> None:
    reply_to_chats(page, [cut, refusal(404, "session_not_found")])
    ask(page, STORY)
    assert wait_for_end(page) == undisturbed(stack, STORY, 40)


def test_everything_can_be_done_by_keyboard(page: Any) -> None:
    def focused() -> str:
        name = "({id, ariaLabel, textContent}) => id || ariaLabel || textContent.trim()"
        return str(page.evaluate(f"document.activeElement === document.body ? '' : ({name})(document.activeElement)"))

    def press(*keys: str) -> None:
        for each in keys:
            page.keyboard.press(each)

    def press_until(name: str) -> None:
        while focused() != name:
            press("Tab")

    press("Tab")
    assert focused() == "Skip to the message"
    assert page.locator(".skips a").first.evaluate("link => getComputedStyle(link).opacity") == "1"
    press("Enter")
    assert focused() == "message"
    page.keyboard.type("Count to three.")
    press("Enter")
    assert wait_for_end(page)
    assert focused() == "message"
    # All of it in the order in which it stands, and round again.
    order: list[str] = []
    press("Tab")
    while focused() not in (order[:1] or [""]) and len(order) < 30:
        order.append(focused())
        press("Tab")
    wanted = ["send", "temperature", "max-tokens", "servers", "Skip to the message", "Skip to the servers",
              "new-session", "Count to three.", "End the session Count to three.", "log", "message"]  # fmt: skip
    assert [each for each in order if each][: len(wanted)] == wanted
    # A long answer is stopped, and the session goes on.
    press_until("max-tokens")
    press("Control+A")
    page.keyboard.type("400")
    press_until("message")
    page.keyboard.type(STORY)
    press("Enter")
    wait_for_text(page, 20)
    press("Escape")
    page.get_by_text("stopped; the session goes on").wait_for(timeout=PATIENCE_MS)
    assert focused() == "message"
    page.keyboard.type("What is two and two?")
    press("Enter")
    assert wait_for_end(page)
    press_until("new-session")
    press("Enter")
    assert focused() == "message"
    assert page.locator("#log article").count() == 0


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_everybody(page: Any, scheme: str, size: dict[str, int]) -> None:
    page.set_viewport_size(size)
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    ask(page, "Say hello.", 12)
    wait_for_end(page)
    red, green, blue = page.evaluate(
        "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (red + green + blue > 3 * 128) == (scheme == "light")
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert barriers(page) == []
    assert page.get_by_role("img").first.get_attribute("aria-label").startswith("30 blocks. blocks 0\u201313: ")


def test_no_text_becomes_markup(page: Any) -> None:
    ask(page, MARKUP, 8)
    wait_for_end(page)
    assert page.locator("article.user .text").text_content() == MARKUP
    assert page.locator(".session").first.text_content() == MARKUP[:60]
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()


def test_events_are_read_however_they_are_cut(page: Any) -> None:
    text = 'data: {"a": 1}\n\n: still there\n\nevent: error\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
    read = """async ([text, size]) => {
        const {EventReader} = await import("/page/events.js");
        const reader = new EventReader(), found = [];
        for (let at = 0; at < text.length; at += size) found.push(...reader.take(text.slice(at, at + size)));
        return found;
    }"""
    for size in (1, 2, 7, len(text)):
        found = page.evaluate(read, [text, size])
        assert found == [["message", '{"a": 1}'], ["error", "one\ntwo"], ["message", "[DONE]"]]


def test_blocks_stay_with_who_holds_them_until_answers_go_elsewhere(page: Any) -> None:
    def holders(before: list[str], **answers: int) -> list[str | None]:
        servers = [
            {"name": name, "blocks": blocks, "state": state, "answers": answers.get(name, 0)}
            for name, blocks, state in (
                ("a", [0, 2], "ready"), ("b", [2, 4], "draining"), ("c", [2, 4], "ready"), ("d", [3, 5], "lost")
            )
        ]  # fmt: skip
        script = "async ([placement, before]) => (await import('/page/holders.js')).holdersOf(placement, before)"
        found: list[str | None] = page.evaluate(script, [{"num_blocks": 5, "servers": servers}, before])
        return found

    assert holders([]) == ["a", "a", "c", "c", None]
    assert holders(["a", "a", "b", "b", "d"]) == ["a", "a", "b", "b", None]
    assert holders(["a", "a", "b", "b", "d"], b=1, c=2) == ["a", "a", "b", "b", None]
    assert holders(["a", "a", "b", "b", "d"], c=1) == ["a", "a", "c", "c", None]


def test_the_browser_keeps_the_page_from_mistakes(chromium: Any, stack: Stack) -> None:
    page = chromium.new_page()
    page.goto(stack.page_url)
    for mistake in (
        "document.body.innerHTML = '<p>markup</p>'",
        "fetch('https://elsewhere.example/')",
        "document.createElement('script').text = 'document.title = 1'",
    ):
        attempt = f"async () => {{ try {{ await ({mistake}); return 'done' }} catch {{ return 'kept' }} }}"
        assert page.evaluate(attempt) == "kept", mistake
    page.close()


def test_a_key_is_asked_for_and_stays_in_the_tab(chromium: Any, tmp_path: Path) -> None:
    key = "a-simple-key-of-bob"
    elsewhere = NewKey("acme", models=["another"])
    (tmp_path / "keys").write_text(f"{elsewhere.record.line}\nbob:{key}\n")
    environment = {"COROLLA_API_KEYS_FILE": str(tmp_path / "keys")}
    options = StackOptions(blocks="0:30", log_folder=tmp_path / "logs", environment=environment)
    with Stack(options) as stack:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(stack.page_url)
        field = page.get_by_label("This service asks for an API key")
        for given, problem in (
            ("nobody's", "The service does not take this key."),
            (elsewhere.key, "This key is for another model."),
            (key, ""),
        ):
            field.wait_for(timeout=PATIENCE_MS)
            field.fill(given)
            page.get_by_role("button", name="Use this key").click()
            if problem:
                page.get_by_text(problem).wait_for(timeout=PATIENCE_MS)
                assert page.evaluate("document.activeElement.id") == "key"
                assert page.locator("#key-form").bounding_box()["height"] < 120
                assert barriers(page) == []
        page.get_by_text("live", exact=True).wait_for(timeout=PATIENCE_MS)
        ask(page, "Say hello.", 8)
        assert wait_for_end(page)
        page.reload()
        page.get_by_text("live", exact=True).wait_for(timeout=PATIENCE_MS)
        assert field.is_hidden()
        assert key not in page.content()
        assert key not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        other = context.new_page()
        other.goto(stack.page_url)
        other.get_by_label("This service asks for an API key").wait_for(timeout=PATIENCE_MS)
        context.close()
