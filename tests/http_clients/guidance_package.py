"""`guidance`, by its class for OpenAI's API: `python guidance_package.py URL KEY WHAT [MODEL]`.

Its class for vLLM sends grammars of its own by `guided_grammar`, which is refused by name.
"""

import sys

from cars import QUESTION, Car
from guidance import assistant, gen, json, models, user


def main(url: str, key: str, what: str, model: str = "tiny") -> None:
    asked = models.OpenAI(model, api_key=key, base_url=f"{url}/v1", echo=False)
    with user():
        asked += QUESTION
    with assistant():
        if what == "chats":
            asked += gen("answer", max_tokens=8, temperature=0.0)
            assert asked["answer"]
        else:
            asked += json("answer", schema=Car, max_tokens=300, temperature=0.0)
            Car.model_validate_json(asked["answer"], extra="forbid")


if __name__ == "__main__":
    main(*sys.argv[1:])
