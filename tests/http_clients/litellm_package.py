"""`litellm`, as proxies use it: `python litellm_package.py URL KEY WHAT`."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a foreign host

import litellm

MESSAGES: list[Any] = [{"role": "user", "content": "Who is the thin man?"}]


def main(url: str, key: str, what: str) -> None:
    asked: dict[str, Any] = {
        "model": "openai/tiny", "api_base": f"{url}/v1", "api_key": key, "messages": MESSAGES, "temperature": 0,
        "num_retries": 0,
    }  # fmt: skip
    if what == "chats":
        whole = litellm.completion(**asked, max_tokens=12)
        chunks = litellm.completion(**asked, max_tokens=12, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        try:
            litellm.completion(**asked, max_tokens=0)
        except litellm.BadRequestError:
            return
        raise SystemExit("there was no BadRequestError")
    answer = litellm.completion(
        **asked,
        max_tokens=64,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "answer",
                "strict": True,
                "schema": {
                    "type": "object",
                    "properties": {"yes": {"type": "boolean"}},
                    "required": ["yes"],
                    "additionalProperties": False,
                },
            },
        },
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"yes"}


if __name__ == "__main__":
    main(*sys.argv[1:])
