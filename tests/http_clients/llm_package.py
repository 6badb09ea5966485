"""`llm`, the command line and library of prompts: `python llm_package.py URL KEY WHAT`."""

import json
import os
import sys
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
# The package of the demo model is a plugin that wants llama.cpp.
os.environ.update(LLM_USER_PATH=str(FOLDER), LLM_LOAD_PLUGINS="")

import llm  # noqa: E402


def colour(name: str) -> str:
    """The colour of a thing."""
    return f"{name} is red"


def main(url: str, key: str, what: str) -> None:
    known = {
        "model_id": "here",
        "model_name": "tiny",
        "api_base": f"{url}/v1",
        "api_key_name": "here",
        "supports_tools": True,
    }
    (FOLDER / "extra-openai-models.yaml").write_text(json.dumps([{**known, "supports_schema": True}]))
    model = llm.get_model("here")
    options = {"key": key, "temperature": 0, "max_tokens": 12}
    if what == "chats":
        conversation = model.conversation()
        whole = conversation.prompt("Who is the thin man?", stream=False, **options)
        assert whole.text() == "".join(model.prompt("Who is the thin man?", **options))
        assert whole.usage().output > 0
        assert conversation.prompt("And then?", **options).text()
        return
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    answer = model.prompt("Is it?", schema=schema, stream=False, **{**options, "max_tokens": 64})
    assert set(json.loads(answer.text())) == {"yes"}
    assert model.chain("What colour is it?", tools=[colour], key=key, options={"max_tokens": 12}).text()


if __name__ == "__main__":
    main(*sys.argv[1:])
