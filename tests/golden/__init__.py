"""The unsplit demo model's answers, kept in `answers.json`: `make golden` recomputes it, which takes minutes.

Every answer ignores end tokens, so that each has all its tokens. What the model answers when it may end is the same
up to the first end token, which tests use.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.reference import Sampling

FOLDER: Final = Path(__file__).parent
ANSWERS: Final = FOLDER / "answers.json"
NUM_NEW_TOKENS: Final = 128
MAX_PROMPT_TOKENS: Final = 600

SAMPLINGS: Final[tuple[Sampling, ...]] = (
    {"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 40}, {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.08}, {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
)  # fmt: skip

_SEED_CHANGES: Final[dict[str, int]] = {"english-address": 100, "german": 100}
"""Changed seeds of prompts whose first seed led to a choice too close to prove anything."""

SAFE_GAP: Final = 5e-4
"""Logits of equal arithmetic in another order differ by up to about a tenth of it; closer choices prove nothing."""


@dataclass(frozen=True, slots=True)
class GoldenAnswer:
    """One answer.

    Attributes:
        prompt: name of the prompt's file.
        sampling: empty for greedy.
        prompt_ids: its first 600 tokens.
        token_ids: 128 new tokens.
        smallest_gap: by how much the chosen tokens won at least, in units of the logits.
    """

    prompt: str
    sampling: Sampling
    prompt_ids: list[int]
    token_ids: list[int]
    smallest_gap: float

    @property
    def name(self) -> str:
        """The name that messages show."""
        options = ", ".join(f"{name}={value}" for name, value in self.sampling.items())
        return f"{self.prompt} ({options or 'greedy'})"


@functools.cache
def golden_answers() -> tuple[GoldenAnswer, ...]:
    """The kept answers: for each prompt a greedy and a sampled one."""
    kept = json.loads(ANSWERS.read_text(encoding="utf-8"))
    return tuple(GoldenAnswer(**answer) for answer in kept["answers"])


def prompt_texts() -> dict[str, str]:
    """All prompts by name, without the newline that ends each file."""
    return {
        path.stem: path.read_text(encoding="utf-8").removesuffix("\n")
        for path in sorted((FOLDER / "prompts").glob("*.txt"))
    }


def cases() -> list[tuple[str, Sampling]]:
    """Each prompt greedily, and with one of the parameter combinations and a seed of its own."""
    named: list[tuple[str, Sampling]] = []
    for number, prompt in enumerate(prompt_texts()):
        seed = 1000 + number + _SEED_CHANGES.get(prompt, 0)
        named += [(prompt, {}), (prompt, {**SAMPLINGS[number % len(SAMPLINGS)], "seed": seed})]
    return named
