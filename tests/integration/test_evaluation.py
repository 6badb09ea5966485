"""The evaluation harness `lm-eval` scores a served model as it scores the unsplit one."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_tiny_checkpoint
from tests.http_clients import EVALUATION, command_of, script, variables
from tests.integration.swarm import Swarm
from tests.reference import Unsplit

pytestmark = [pytest.mark.asyncio, pytest.mark.full, pytest.mark.timeout(600)]

KEY = "a-key-of-the-harness"
QUESTIONS: list[dict[str, Any]] = [
    {"question": "Who is in the tent?", "choices": ["the thin man", "an inner thing", "nobody"], "label": 0},
    {"question": "The man is", "choices": ["thin", "in the tent"], "label": 1},
    {"question": "Naïve \u4e2d\u6587", "choices": ["\U0001f600", "ä", "a"], "label": 2},
]
WINDOW = 126
"""The harness is told 128 tokens, and leaves one for its prefix and one for the token that it must generate."""
# The last text is longer than the window.
TEXTS = [{"text": "the thin man in the inner tent " * number} for number in (1, 3, 12)]


class Truth:
    """The scores of the unsplit model, as the harness defines them."""

    def __init__(self, folder: Path) -> None:
        self._unsplit = Unsplit(folder)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._unsplit.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @torch.inference_mode()
    def score(self, before: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log probability of a continuation, summed in float64, and whether it is the greedy one."""
        logits = self._unsplit.model(torch.tensor([[*before, *continuation]])).logits[0].double()
        rows = logits[len(before) - 1 : -1].log_softmax(dim=-1)
        wanted = torch.tensor(continuation)
        return float(rows.gather(1, wanted.unsqueeze(1)).sum()), bool((rows.argmax(dim=-1) == wanted).all())

    def choice(self, question: str, answer: str) -> tuple[float, bool]:
        before = self.encode(question)
        return self.score(before, self.encode(question + answer)[len(before) :])

    def text(self, text: str, window: int) -> float:
        """The log probability of a whole text in windows that do not overlap, after the end token."""
        ids = self.encode(text)
        prefix = self.encode(self._unsplit.tokenizer.eos_token)[:1]
        total, done = 0.0, 0
        while done < len(ids):
            if done == 0:
                part = ids[:window]
                total += self.score(prefix, part)[0]
                done += len(part)
                continue
            end = min(done + window, len(ids))
            start = max(0, end - window - 1)
            total += self.score(ids[start:done], ids[done:end])[0]
            done = end
        return total


async def test_the_harness_finds_the_scores_of_the_unsplit_model(tmp_path: Path) -> None:
    model, folder = make_tiny_checkpoint("llama", tmp_path / "tiny"), tmp_path / "tasks"
    folder.mkdir()
    for name, documents in (("choices", QUESTIONS), ("texts", TEXTS)):
        (folder / f"{name}.json").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "keys").write_text(f"harness:{KEY}\n")
    client = {"http_port": 0, "api_keys_file": tmp_path / "keys"}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], client=client, api_key=KEY) as swarm:
        url = swarm.url
        process = await asyncio.create_subprocess_exec(
            *command_of(script("lm_eval"), url, KEY, str(folder), packages=EVALUATION),
            env=variables(EVALUATION), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-6000:]
    found = json.loads((folder / "requests.json").read_text())["samples"]
    truth = Truth(model)
    asked = 0
    for sample in found["choices"]:
        for (question, answer), (logprob, is_greedy) in zip(sample["arguments"], sample["found"], strict=True):
            expected, is_truly_greedy = truth.choice(question, answer)
            assert math.isclose(logprob, expected, abs_tol=1e-4), (question, answer)
            assert is_greedy == is_truly_greedy
            asked += 1
    assert asked == sum(len(each["choices"]) for each in QUESTIONS)
    for sample, document in zip(found["texts"], TEXTS, strict=True):
        assert math.isclose(sample["found"][0], truth.text(document["text"], WINDOW), abs_tol=1e-4), document
