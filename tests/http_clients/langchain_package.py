"""`langchain-openai`: `python langchain_package.py URL KEY WHAT`."""

import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]


def main(url: str, key: str, what: str) -> None:
    model = ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key=key, temperature=0, max_retries=0, max_tokens=12, seed=1
    )
    heard: list[Any] = [SystemMessage("Be short."), HumanMessage("Who is the thin man?")]
    if what == "chats":
        whole = model.invoke(heard)
        assert whole.usage_metadata["output_tokens"] > 0
        assert "".join(chunk.text for chunk in model.stream(heard)) == whole.text
        assert len(model.batch([heard, heard])) == 2
        remembered = ChatOpenAI(
            model="tiny", base_url=f"{url}/v1", api_key=key, temperature=0, use_responses_api=True, max_retries=0
        )
        assert remembered.invoke("hello", max_output_tokens=8).text
        return
    patient = model.model_copy(update={"max_tokens": 200})
    called = patient.bind_tools([Weather], tool_choice="any", strict=True).invoke(heard)
    assert called.tool_calls[0]["args"]["city"] in ("Oslo", "Rome")
    found = patient.with_structured_output(Weather, method="json_schema", strict=True).invoke(heard)
    assert found.city in ("Oslo", "Rome")


if __name__ == "__main__":
    main(*sys.argv[1:])
