"""Requests that programs of other people sent, each with what it ignores and with a whole answer.

`tests/http_clients/recorded.jsonl` has a request in each line, as the program sent it, apart from its long texts and
the name of the model.
"""

import json
from typing import Any, Final

import httpx2
import pytest

from tests.http_clients import RECORDED
from tests.integration.swarm import tiny_swarm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]

CASES: Final = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
NUM_TOKENS: Final = 24
"""The most tokens of an answer whose request sets no number."""


swarm = tiny_swarm(
    ["0:2", "2:5"],
    context_length=32768,
    client={"http_port": 0, "default_max_tokens": NUM_TOKENS},
    server={"kv_cache_mib": 256},
)


def events_of(text: str) -> list[Any]:
    """The data of the events of a stream, without comments."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def end_of(path: str, reply: Any, events: list[Any]) -> Any:
    """How the answer ended: its finish reason, or the status of a response."""
    if path.endswith("/responses"):
        last = json.loads(events[-1])["response"] if events else reply
        return last["status"]
    if not events:
        return reply["choices"][0]["finish_reason"]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(each) for each in events[:-1]]
    return next(each["choices"][0]["finish_reason"] for each in reversed(chunks) if each["choices"])


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{number}-{CASES[number]['program']}")
async def test_a_request_of_a_program_is_answered(http: httpx2.AsyncClient, number: int) -> None:
    case = CASES[number]
    reply = await http.post(case["path"], json=case["body"])
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-corolla-ignored", "") == case["ignored"]
    if case["path"] in ("/v1/embeddings", "/rerank"):
        assert reply.json().keys() & {"data", "results"}
        return
    events = events_of(reply.text) if case["body"].get("stream") else []
    ended = end_of(case["path"], None if events else reply.json(), events)
    assert ended in ("stop", "length", "tool_calls", "completed", "incomplete")


async def test_coding_agents_are_among_the_programs() -> None:
    programs = {case["program"] for case in CASES}
    assert {"aider", "cline", "codex", "continue", "guidellm", "Open WebUI", "opencode", "promptfoo"} <= programs
    assert any(case["body"].get("tools") and case["body"].get("stream") for case in CASES)
