"""`smolagents`: `python smolagents_package.py URL KEY WHAT`."""

import json
import sys
from typing import Literal

from smolagents import ChatMessage, MessageRole, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import agglomerate_stream_deltas


@tool  # type: ignore[untyped-decorator]
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city.

    Args:
        city: The city.
    """
    return f"sunny in {city}"


def main(url: str, key: str, what: str) -> None:
    limit = 12 if what == "chats" else 200
    model = OpenAIModel("tiny", api_base=f"{url}/v1", api_key=key, temperature=0, max_tokens=limit)
    heard = [ChatMessage(MessageRole.USER, [{"type": "text", "text": "Who is the thin man?"}])]
    if what == "chats":
        whole = model.generate(heard)
        assert whole.token_usage.output_tokens > 0
        assert agglomerate_stream_deltas(list(model.generate_stream(heard))).content == whole.content
        return
    called = model.generate(heard, tools_to_call_from=[weather])
    assert json.loads(called.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")
    agent = ToolCallingAgent([weather], model, max_steps=1, verbosity_level=0)
    agent.run("What is the weather in Rome?")
    assert agent.memory.steps[1].token_usage.output_tokens > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
