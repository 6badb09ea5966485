"""The official `anthropic` package, blocking and for asyncio: `python anthropic_package.py URL KEY WHAT [MODEL]`."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel

MODEL = sys.argv[4] if len(sys.argv) > 4 else "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Who is the thin man?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "extra_body": {"temperature": 0}}
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "cache_control": {"type": "ephemeral"},
    }
]


class Answer(BaseModel):
    yes: bool


def fails_with(kind: type[Exception], call: Callable[[], object]) -> Any:
    try:
        call()
    except kind as failure:
        return failure
    raise SystemExit(f"there was no {kind.__name__}")


def chats(client: Anthropic) -> None:
    asked: dict[str, Any] = {**GREEDY, "messages": MESSAGES, "system": [{"type": "text", "text": "Be short."}]}
    whole = client.messages.create(**asked, max_tokens=12)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole.content[0].type == "text"
    assert client.messages.with_raw_response.create(**asked, max_tokens=1).headers["request-id"]
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system=asked["system"])
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with client.messages.stream(**asked, max_tokens=12) as stream:
        streamed_text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed_text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == usage.output_tokens
    assert (final.usage.cache_read_input_tokens or 0) + final.usage.input_tokens == counted.input_tokens
    first = streamed_text[4:6]
    stopped = client.messages.create(**asked, max_tokens=12, stop_sequences=["\x00never", first])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", first)
    assert stopped.content[0].text == streamed_text.partition(first)[0]
    begun = [*MESSAGES, {"role": "assistant", "content": streamed_text}]
    assert client.messages.create(**GREEDY, messages=begun, max_tokens=4).usage.output_tokens
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).display_name == MODEL


def errors(client: Anthropic, url: str) -> None:
    create = client.messages.create
    bad = fails_with(anthropic.BadRequestError, lambda: create(**GREEDY, messages=MESSAGES, max_tokens=0))
    assert (bad.type, bad.body["error"]["type"]) == ("invalid_request_error", "invalid_request_error")
    assert bad.body["error"]["message"].startswith("max_tokens: ")
    assert bad.request_id == bad.body["request_id"]
    fails_with(anthropic.NotFoundError, lambda: create(model="other", messages=MESSAGES, max_tokens=1))
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    seen: list[Any] = [{"role": "user", "content": [picture]}]
    refused = fails_with(anthropic.BadRequestError, lambda: create(**GREEDY, messages=seen, max_tokens=1))
    assert "images are not supported" in refused.message
    long: list[Any] = [{"role": "user", "content": "so " * 6000}]
    large = fails_with(anthropic.BadRequestError, lambda: create(**GREEDY, messages=long, max_tokens=1))
    assert "prompt is too long" in large.message
    stranger = Anthropic(base_url=url, api_key="nobody", max_retries=0)
    fails_with(
        anthropic.AuthenticationError, lambda: stranger.messages.create(**GREEDY, messages=MESSAGES, max_tokens=1)
    )


async def for_asyncio(url: str, key: str) -> None:
    # The client sends a token in another header than a key.
    async with AsyncAnthropic(base_url=url, auth_token=key, api_key=None, max_retries=0) as client:
        asked: dict[str, Any] = {**GREEDY, "messages": MESSAGES, "max_tokens": 12}

        async def streamed() -> str:
            async with client.messages.stream(**asked) as stream:
                return "".join([each async for each in stream.text_stream])

        whole, streamed_text = await asyncio.gather(client.messages.create(**asked), streamed())
        assert streamed_text == whole.content[0].text


def tools(client: Anthropic) -> None:
    asked: dict[str, Any] = {**GREEDY, "tools": TOOLS, "max_tokens": 200}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        once: Any = {**choice, "disable_parallel_tool_use": True}
        first = client.messages.create(**asked, messages=MESSAGES, tool_choice=once)
        (use,) = first.content
        assert first.stop_reason == "tool_use"
        assert use.input["city"] in ("Oslo", "Rome")
        with client.messages.stream(**asked, messages=MESSAGES, tool_choice=once) as stream:
            (same,) = stream.get_final_message().content
        assert same.input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    heard: list[Any] = [*MESSAGES, first.to_param(), {"role": "user", "content": [result]}]
    assert client.messages.create(**{**asked, "max_tokens": 4}, messages=heard).usage.output_tokens
    none = client.messages.create(**asked, messages=MESSAGES, tool_choice={"type": "none"})
    assert all(each.type == "text" for each in none.content)
    raw = client.messages.with_raw_response.create(**{**asked, "max_tokens": 1}, messages=MESSAGES)
    assert "cache_control" in raw.headers["x-corolla-ignored"]
    found = client.messages.parse(**GREEDY, messages=MESSAGES, max_tokens=64, output_format=Answer)
    assert found.parsed_output is not None


def main(url: str, key: str, what: str, _: str = "") -> None:
    client = Anthropic(base_url=url, api_key=key, max_retries=0)
    if what == "chats":
        chats(client)
        errors(client, url)
        asyncio.run(for_asyncio(url, key))
    else:
        tools(client)


if __name__ == "__main__":
    main(*sys.argv[1:])
