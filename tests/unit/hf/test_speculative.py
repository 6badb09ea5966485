"""Drafts for local models, which work as with remote ones."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from corolla.decoding.draft_model import DraftModel
from corolla.hf.speculative import SPECULATIVE_CLASSES_BY_NAME, SpeculativeGenerationMixin

CONTEXT_LENGTH = 256


class Speculative(SpeculativeGenerationMixin, LlamaForCausalLM):  # type: ignore[misc]
    """A local model with drafts; counts its passes."""

    num_passes = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_passes += 1
        return super().forward(*args, **kwargs)


def make(model_class: Any, seed: int, vocabulary_size: int, *, spread: float = 0.4) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=spread, max_position_embeddings=CONTEXT_LENGTH, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return model_class(config).eval()


def speculative(small_model: Any, vocabulary_size: int, **options: Any) -> Any:
    model = make(Speculative, 0, vocabulary_size, **options)
    model.draft_model = DraftModel(small_model, CONTEXT_LENGTH, vocabulary_size)
    return model


@pytest.fixture(scope="module")
def plain() -> Any:
    return make(LlamaForCausalLM, 0, 61)


@pytest.fixture(scope="module", params=["clone", "perturbed", "stranger"])
def model(request: pytest.FixtureRequest) -> Any:
    small_model = make(LlamaForCausalLM, 5 if request.param == "stranger" else 0, 61)
    if request.param == "perturbed":
        with torch.no_grad():
            small_model.lm_head.weight.add_(torch.randn_like(small_model.lm_head.weight) * 0.05)
    return speculative(small_model, 61)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_new_tokens": 40},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "length of the whole text": {"max_length": 25},
    "end tokens": {"max_new_tokens": 40, "eos_token_id": list(range(1, 61, 9))},
    "least length": {"max_new_tokens": 40, "min_new_tokens": 11, "eos_token_id": list(range(1, 61, 4))},
    "penalties": {"max_new_tokens": 40, "repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_greedy_answers_are_those_of_plain_decoding(plain: Any, model: Any, options: dict[str, Any]) -> None:
    for seed in range(2):
        prompt = torch.randint(1, 61, (1, 3 + 2 * seed), generator=torch.Generator().manual_seed(seed))
        expected = plain.generate(prompt, do_sample=False, **options)
        size = (3, 10)[seed]
        got = model.generate(prompt, do_sample=False, speculative_inference_iteration_size=size, **options)
        assert got.tolist() == expected.tolist(), f"seed {seed}, {size} draft tokens"


@pytest.mark.parametrize("size", [1, 4, 10])
def test_a_cloned_draft_model_is_always_accepted_and_gives_one_more_token(plain: Any, size: int) -> None:
    model = speculative(plain, 61)
    model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=3 * (size + 1), do_sample=False,
                   speculative_inference_iteration_size=size)  # fmt: skip
    assert model.num_passes == 3


def test_each_token_is_streamed_once_and_in_order(model: Any) -> None:
    class Tokens(BaseStreamer):
        def __init__(self) -> None:
            self.token_ids: list[int] = []
            self.is_ended = False

        def put(self, value: Tensor) -> None:
            self.token_ids += value.flatten().tolist()

        def end(self) -> None:
            self.is_ended = True

    streamer = Tokens()
    answer = model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=20, do_sample=False, streamer=streamer)
    assert streamer.token_ids == answer[0].tolist()
    assert streamer.is_ended


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.6, "top_k": 4}])
@pytest.mark.full
def test_sampled_answers_have_the_targets_distribution(filters: dict[str, Any]) -> None:
    """All answers of three tokens from a vocabulary of five, against their exact probabilities."""
    small_model = make(LlamaForCausalLM, 5, 5, spread=0.15)
    model = speculative(small_model, 5, spread=0.15)
    prompt = torch.tensor([[1, 3]])
    expected = exact_probabilities(make(LlamaForCausalLM, 0, 5, spread=0.15), prompt, **filters)
    num_draws = 600
    torch.manual_seed(11)
    counts = torch.zeros(5, 5, 5)
    config = GenerationConfig(do_sample=True, max_new_tokens=3, pad_token_id=0, **{"top_k": 0, **filters})
    for _ in range(num_draws):
        answer = model.generate(prompt, generation_config=config, speculative_inference_iteration_size=2)
        counts[tuple(answer[0, 2:].tolist())] += 1
    # Two passes for each answer would be the most; the draft model is a stranger, so some draft tokens were wrong.
    assert 1.05 * num_draws < model.num_passes < 2.8 * num_draws
    assert not counts[expected == 0].any()
    # Answers that are too seldom for the statistic are counted as one.
    is_common = num_draws * expected >= 5
    observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    wanted = num_draws * torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square < chi_square_limit(len(wanted) - 1)


def exact_probabilities(plain: Any, prompt: Tensor, *, temperature: float = 1.0, top_k: int = 5) -> Tensor:
    """`[5, 5, 5]`."""
    probabilities = torch.ones(5, 5, 5)
    for first in range(5):
        for second in range(5):
            text = torch.cat([prompt, torch.tensor([[first, second]])], dim=1)
            logits = plain(text).logits[0, -3:] / temperature
            kept = logits >= logits.topk(top_k).values[:, -1:]
            rows = logits.masked_fill(~kept, -torch.inf).softmax(dim=-1)
            probabilities[first, second] = rows[0, first] * rows[1, second] * rows[2]
    return probabilities.detach()


def chi_square_limit(degrees: int) -> float:
    """Exceeded in one case of ten thousand, by the approximation of Wilson and Hilferty."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.72 * spread**0.5) ** 3)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"use_cache": False}, "cache"),
        ({"speculative_inference_iteration_size": 0}, "speculative_inference_iteration_size"),
        ({"speculative_inference_iteration_size": 65}, "speculative_inference_iteration_size"),
    ],
)
def test_unsupported_arguments_are_refused(model: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        model.generate(torch.tensor([[7, 8, 9]]), **{"max_new_tokens": 4, **options})


def test_a_batch_and_a_model_without_a_draft_model_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="one sequence"):
        model.generate(torch.tensor([[7, 8], [8, 9]]), max_new_tokens=4)
    with pytest.raises(ValueError, match="small_model"):
        make(Speculative, 0, 61).generate(torch.tensor([[7, 8]]), max_new_tokens=4)


def test_every_family_has_its_class() -> None:
    assert "DistributedLlamaForSpeculativeGeneration" in SPECULATIVE_CLASSES_BY_NAME
    assert "DistributedBloomForSpeculativeGeneration" in SPECULATIVE_CLASSES_BY_NAME
    assert len(SPECULATIVE_CLASSES_BY_NAME) == len({each.model_type for each in SPECULATIVE_CLASSES_BY_NAME.values()})


@pytest.mark.parametrize("token_id", [61, -1])
def test_a_token_outside_the_vocabulary_is_named(model: Any, token_id: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {token_id} .*vocabulary.* 61"):
        model.generate(torch.tensor([[7, token_id, 9]]), max_new_tokens=4)


def test_a_small_model_with_fewer_embeddings_drafts_on_behind_a_token_that_it_lacks(plain: Any) -> None:
    """Equal tokenizers, but the embeddings of the large model are padded further."""
    model = speculative(make(LlamaForCausalLM, 5, 40), 61)
    prompt = torch.tensor([[7, 55, 60]])
    expected = plain.generate(prompt, do_sample=False, max_new_tokens=12)
    assert model.generate(prompt, do_sample=False, max_new_tokens=12).tolist() == expected.tolist()
