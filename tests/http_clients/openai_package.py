"""The official `openai` package, blocking and for asyncio: `python openai_package.py URL KEY WHAT [MODEL]`."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from cars import QUESTION, Car
from openai import AsyncOpenAI, OpenAI

MESSAGES: list[Any] = [{"role": "user", "content": "Who is the thin man?"}]
MODEL = sys.argv[4] if len(sys.argv) > 4 else "tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "count": {"enum": [1, 2, 3]}},
    "required": ["yes", "count"],
    "additionalProperties": False,
}


def fails_with(kind: type[Exception], call: Callable[[], object]) -> Any:
    try:
        call()
    except kind as failure:
        return failure
    raise SystemExit(f"there was no {kind.__name__}")


def chats(client: OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert choice.finish_reason in ("stop", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    stream = client.chat.completions.create(
        **GREEDY, messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    named = client.chat.completions.create(
        **GREEDY, messages=MESSAGES, max_tokens=6, extra_body={"request_id": "mine", "min_p": 0.0, "top_k": 0}
    )
    assert named.choices[0].message.content is not None
    completion = client.completions.create(**GREEDY, prompt=["a", "b"], max_tokens=4)
    assert [each.index for each in completion.choices] == [0, 1]
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def responses(client: OpenAI) -> None:
    first = client.responses.create(**GREEDY, input="hello", max_output_tokens=8)
    assert first.output_text
    second = client.responses.create(**GREEDY, input="go on", max_output_tokens=8, previous_response_id=first.id)
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
    with client.responses.stream(**GREEDY, input="hello", max_output_tokens=8, store=False) as stream:
        found = list(stream)
    text = "".join(each.delta for each in found if each.type == "response.output_text.delta")
    assert text == first.output_text == found[-1].response.output_text


def errors(client: OpenAI) -> None:
    create = client.chat.completions.create
    bad = fails_with(openai.BadRequestError, lambda: create(**GREEDY, messages=MESSAGES, max_tokens=0))
    assert (bad.param, bad.code) == ("max_tokens", "invalid_request")
    fails_with(openai.NotFoundError, lambda: create(model="other", messages=MESSAGES))
    fails_with(openai.NotFoundError, lambda: create(**GREEDY, messages=MESSAGES, extra_body={"session_id": "a" * 32}))
    stranger = client.with_options(api_key="nobody")
    fails_with(openai.AuthenticationError, lambda: stranger.chat.completions.create(**GREEDY, messages=MESSAGES))


async def for_asyncio(url: str, key: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        whole, stream = await asyncio.gather(
            client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=12),
            client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=12, stream=True),
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content


def strict_json(client: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    for temperature in (0, 1):
        answer = client.chat.completions.create(
            model=MODEL, temperature=temperature, messages=MESSAGES, response_format=wanted, max_tokens=64
        )
        found = json.loads(answer.choices[0].message.content or "")
        assert set(found) == {"yes", "count"}


def parsed(client: OpenAI) -> None:
    """What the package makes of a model of pydantic's, and makes of the answer."""
    options: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300}
    by_format = client.chat.completions.parse(**options, response_format=Car).choices[0].message.parsed
    assert isinstance(by_format, Car)
    tool = openai.pydantic_function_tool(Car)
    called = client.chat.completions.parse(**options, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Car)
    by_response = client.responses.parse(**GREEDY, input=QUESTION, text_format=Car, max_output_tokens=300)
    assert by_response.output_parsed == by_format


def tools(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        **GREEDY, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200,
    }  # fmt: skip
    first = client.chat.completions.create(**asked, messages=MESSAGES)
    call = first.choices[0].message.tool_calls[0]
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    parts = ""
    for chunk in client.chat.completions.create(**asked, messages=MESSAGES, stream=True):
        for each in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            parts += (each.function.arguments or "") if each.index == 0 else ""
    assert json.loads(parts) == json.loads(call.function.arguments)
    heard = [*MESSAGES, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(**GREEDY, messages=heard, max_tokens=4).choices[0].message is not None


def known_answer(client: OpenAI) -> None:
    """Standard input says what is asked, and what has to be answered, in token ids."""
    known = json.load(sys.stdin)
    body = {"ignore_eos": True, "return_token_ids": True}
    asked: dict[str, Any] = {**GREEDY, "prompt": known["prompt"], "max_tokens": len(known["answer"])}
    (choice,) = client.completions.create(**asked, extra_body=body).choices
    chunks = list(client.completions.create(**asked, extra_body=body, stream=True))
    for found in ([choice], [each for chunk in chunks for each in chunk.choices]):
        assert [token_id for each in found for token_id in each.model_extra["token_ids"]] == known["answer"]


def main(url: str, key: str, what: str, _: str = "") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    if what == "chats":
        chats(client)
        responses(client)
        errors(client)
        asyncio.run(for_asyncio(url, key))
    elif what == "known answer":
        known_answer(client)
    else:
        strict_json(client)
        parsed(client)
        tools(client)


if __name__ == "__main__":
    main(*sys.argv[1:])
