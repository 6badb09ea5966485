"""`instructor`, which asks for a model of pydantic's: `python instructor_package.py URL KEY WHAT [MODEL]`."""

import sys

import instructor
from cars import QUESTION, Car
from instructor import Mode
from openai import OpenAI

FORMS = (Mode.JSON_SCHEMA,)
CALLS = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.RESPONSES_TOOLS)


def main(url: str, key: str, what: str, model: str = "tiny") -> None:
    for mode in FORMS if what == "chats" else CALLS:
        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), mode=mode)
        length = "max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens"
        try:
            car = client.create(
                model=model, temperature=0, messages=[{"role": "user", "content": QUESTION}], response_model=Car,
                max_retries=0, **{length: 300},
            )  # fmt: skip
        except Exception as failure:
            raise SystemExit(f"{mode}: {failure}") from failure
        assert isinstance(car, Car), mode


if __name__ == "__main__":
    main(*sys.argv[1:])
