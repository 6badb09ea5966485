"""`pydantic-ai`: `python pydantic_ai_package.py URL KEY WHAT`."""

import asyncio
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]


async def chats(model: OpenAIChatModel, settings: Any) -> None:
    agent = Agent(model, instructions="Be short.", model_settings=settings)
    whole = await agent.run("Who is the thin man?")
    assert whole.usage.output_tokens > 0
    async with agent.run_stream("Who is the thin man?") as stream:
        assert await stream.get_output() == whole.output


async def structured(model: OpenAIChatModel, settings: Any) -> None:
    by_schema = Agent(model, output_type=NativeOutput(Weather, strict=True), model_settings=settings)
    assert (await by_schema.run("Where?")).output.city in ("Oslo", "Rome")
    by_tool = Agent(model, output_type=Weather, model_settings=settings)
    assert (await by_tool.run("Where?")).output.city in ("Oslo", "Rome")


def main(url: str, key: str, what: str) -> None:
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    settings = {"temperature": 0, "max_tokens": 12 if what == "chats" else 200}
    asyncio.run(chats(model, settings) if what == "chats" else structured(model, settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
