"""The truth: the unsplit model in `transformers`, by its own `generate`, with the random numbers of services."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from corolla.models.loading import LOADING
from tests.philox import exponential_numbers, services_draws
from tests.unpacked import unpacked_demo


class Sampling(TypedDict, total=False):
    """How to choose tokens, by the names of the Python client; nothing is greedy. A temperature comes with a seed."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int


@dataclass(frozen=True, slots=True)
class Reference:
    """What the unsplit model answers.

    Attributes:
        token_ids: of the answer.
        scores: float32 `[tokens, vocabulary]`, after penalties and filters.
        logits: likewise, as the model gave them.
    """

    token_ids: list[int]
    scores: Tensor
    logits: Tensor


class Unsplit:
    """One checkpoint, whole, in float32."""

    def __init__(self, folder: Path) -> None:
        library: Any = AutoModelForCausalLM
        with LOADING:
            model = library.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        # Parameters of servers need no gradients either: `torch.matmul` takes another way where one needs them.
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        eos_token_id = self.model.generation_config.eos_token_id
        self.eos_token_ids: tuple[int, ...] = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
        # Only the end tokens of the checkpoint's own generation config count: all else is said in each call.
        self.model.generation_config.eos_token_id = None

    @classmethod
    def demo(cls) -> Self:
        """The demo model."""
        return cls(unpacked_demo())

    def generate(
        self,
        prompt_ids: Sequence[int],
        num_new_tokens: int,
        sampling: Sampling | None = None,
        *,
        ignore_eos: bool = False,
    ) -> Reference:
        """One answer.

        Args:
            num_new_tokens: at most; exactly so many where end tokens are ignored.
        """
        options = sampling or {}
        ids = torch.tensor([list(prompt_ids)])
        is_sampled = bool(options.get("temperature"))
        filters: dict[str, Any] = {}
        if is_sampled:
            filters = {
                "temperature": options["temperature"],
                "top_k": options.get("top_k", 0),
                "top_p": options.get("top_p", 1.0),
                "min_p": options.get("min_p"),
            }
        if not ignore_eos:
            filters["eos_token_id"] = list(self.eos_token_ids)
        with services_draws(options["seed"]) if is_sampled else nullcontext():
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new_tokens, do_sample=is_sampled,
                repetition_penalty=options.get("repetition_penalty", 1.0), pad_token_id=0, output_scores=True,
                output_logits=True, return_dict_in_generate=True, **filters,
            )  # fmt: skip
        token_ids: list[int] = output.sequences[0, ids.shape[1] :].tolist()
        return Reference(token_ids, torch.cat(output.scores), torch.cat(output.logits))

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, special tokens left out."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def chat_ids(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """A conversation's ids up to where the answer begins."""
        text: str = self.tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids


def smallest_gap(reference: Reference, sampling: Sampling) -> float:
    """How far the winner was ahead where it was closest, in units of the logits.

    For greedy choice that is the distance of the best two scores. A drawn token is the winner of a race, too:
    it has the largest quotient of probability and random number. So the race is repeated here.
    """
    temperature = sampling.get("temperature", 0.0)
    races = reference.scores
    if temperature:
        numbers = [exponential_numbers(sampling["seed"], at, races.shape[1]) for at in range(len(races))]
        races = (races.softmax(dim=-1) / torch.stack(numbers)).log()
    if races.argmax(dim=-1).tolist() != reference.token_ids:
        raise ValueError("the tokens are not those that the scores and the seed give")
    best = races.topk(2).values
    return float((best[:, 0] - best[:, 1]).min()) * (temperature or 1.0)
