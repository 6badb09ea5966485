"""The sampler against `generate` of `transformers` on a small random model, token for token.

`generate` draws by the random numbers of services (`tests.philox`); penalties, filters and logits are its own.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from corolla.chassis.errors import InvalidRequest, NonFiniteOutput
from corolla.decoding.parameters import MAX_LOGPROBS, SamplingParams
from corolla.decoding.sampling import Sampler
from corolla.v1.common_pb2 import SamplingParameters
from tests.philox import services_draws
from tests.sampled import sample
from tests.tiers import covering, quick

VOCABULARY_SIZE = 131
NUM_NEW_TOKENS = 44
PROMPT = [5, 17, 17, 99, 3, 64, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # neither so flat nor so steep a distribution that filters would change nothing
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generated_by_transformers(model: Any, params: SamplingParams, **more: Any) -> list[int]:
    warpers: dict[str, Any] = {}
    if not params.is_greedy:
        assert params.seed is not None
        warpers = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
        }
    ids = torch.tensor([PROMPT])
    with services_draws(params.seed or 0):
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=not params.is_greedy, max_new_tokens=NUM_NEW_TOKENS,
            repetition_penalty=params.repetition_penalty, **warpers, **more,
        )  # fmt: skip
    return [int(token_id) for token_id in output[0, len(PROMPT) :]]


def generated_by_sampler(model: Any, params: SamplingParams) -> list[int]:
    """The same arithmetic as `generate`: one prefill, then single tokens over the cache."""
    sampler = Sampler(params, PROMPT)
    ids: list[int] = []
    step = torch.tensor([PROMPT])
    cache = None
    with torch.no_grad():
        for _ in range(NUM_NEW_TOKENS):
            output = model(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ids.append(sample(sampler, output.logits[0, -1]).token_id)
            step = torch.tensor([ids[-1:]])
    return ids


FACTORS = ([0.7, 1.0, 1.6], [0, 7, 50, 1000], [1.0, 0.85], [0.0, 0.1], [1.0, 1.3, 0.8])
# Each combination of values of three parameters, and of two.
GRID, SOME = covering(*FACTORS, strength=3), covering(*FACTORS)


@pytest.mark.parametrize("parameters", quick(dict.fromkeys([*SOME, *GRID]), *SOME), ids=str)
def test_sampling_equals_generate(model: Any, parameters: tuple[float, int, float, float, float]) -> None:
    temperature, top_k, top_p, min_p, repetition_penalty = parameters
    seed = hash((temperature, top_k, top_p, min_p, repetition_penalty)) % 2**63
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed=seed)
    expected = generated_by_transformers(model, params)
    assert len(expected) == NUM_NEW_TOKENS
    assert generated_by_sampler(model, params) == expected


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.3, 0.8])
def test_greedy_equals_generate(model: Any, repetition_penalty: float) -> None:
    # The filters play no part in greedy choice.
    params = SamplingParams(0, top_k=3, top_p=0.5, min_p=0.2, repetition_penalty=repetition_penalty)
    assert generated_by_sampler(model, params) == generated_by_transformers(model, params)


def test_the_grid_distinguishes_the_parameters(model: Any) -> None:
    answers = {
        tuple(generated_by_sampler(model, params))
        for params in [
            SamplingParams(), SamplingParams(repetition_penalty=1.3), SamplingParams(1.0, seed=1),
            SamplingParams(1.0, seed=2), SamplingParams(0.7, seed=1), SamplingParams(1.0, top_k=7, seed=1),
            SamplingParams(1.0, top_p=0.85, seed=1), SamplingParams(1.0, min_p=0.1, seed=1),
            SamplingParams(1.0, repetition_penalty=1.3, seed=1), SamplingParams(1.0, presence_penalty=1.5, seed=1),
            SamplingParams(1.0, frequency_penalty=-1.0, seed=1),
        ]
    }  # fmt: skip
    assert len(answers) == 11


class OpenAIPenalties(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Presence and frequency penalty counted anew from the answer at each step."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        answer = input_ids[0, len(PROMPT) :].tolist()
        for token_id in set(answer):
            scores[0, token_id] -= answer.count(token_id) * self.frequency + self.presence
        return scores


@pytest.mark.parametrize("temperature", [0.0, 1.1])
@pytest.mark.parametrize("repetition_penalty", [1.0, 1.2])
@pytest.mark.parametrize("presence, frequency", [(0.5, 0.0), (0.0, 0.25), (1.5, 0.5), (-0.5, -0.25)])
def test_presence_and_frequency_equal_a_processor_of_generate(
    model: Any, temperature: float, repetition_penalty: float, presence: float, frequency: float
) -> None:
    # The figures have few bits, so that counting in another order cannot round differently.
    params = SamplingParams(
        temperature,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=11,
    )
    processors = LogitsProcessorList([OpenAIPenalties(presence, frequency)])
    expected = generated_by_transformers(model, params, logits_processor=processors)
    assert generated_by_sampler(model, params) == expected


def random_rows(num_rows: int, vocabulary_size: int = 500) -> Tensor:
    return torch.randn(num_rows, vocabulary_size, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize("num_before", [0, 1, 13])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.4}, {"min_p": 0.3}], ids=str)
def test_a_sampler_goes_on_at_any_position(num_before: int, filters: dict[str, Any]) -> None:
    params = SamplingParams(0.9, repetition_penalty=1.2, presence_penalty=0.5, seed=2**64 - 1, **filters)
    rows = random_rows(20)
    whole = Sampler(params, PROMPT)
    expected = [sample(whole, row).token_id for row in rows]
    later = Sampler(params, PROMPT, generated_ids=expected[:num_before], position=num_before)
    assert sample(later.fork(), rows[num_before]).token_id == expected[num_before]
    assert [sample(later, row).token_id for row in rows[num_before:]] == expected[num_before:]


def test_no_seed_gives_other_answers_each_time() -> None:
    rows = random_rows(20)
    answers = set()
    for _ in range(2):
        sampler = Sampler(SamplingParams(1.0), PROMPT)
        answers.add(tuple(sample(sampler, row).token_id for row in rows))
    assert len(answers) == 2


def test_the_global_random_stream_is_left_alone() -> None:
    before = torch.get_rng_state()
    sample(Sampler(SamplingParams(1.0, seed=1), PROMPT), random_rows(1)[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_those_of_the_untouched_distribution(temperature: float) -> None:
    row = random_rows(1)[0]
    kept = row.clone()
    params = SamplingParams(temperature, top_k=5, repetition_penalty=1.5, seed=1, num_logprobs=3)
    token = sample(Sampler(params, PROMPT), row)
    assert torch.equal(row, kept)
    expected = torch.log_softmax(kept, dim=-1)
    assert token.logprob == expected[token.token_id].item()
    assert [token_id for token_id, _ in token.top_logprobs] == expected.argsort(descending=True)[:3].tolist()
    assert [value for _, value in token.top_logprobs] == expected.sort(descending=True).values[:3].tolist()


def test_logprobs_only_when_asked_for() -> None:
    row = random_rows(1)[0]
    nothing = sample(Sampler(SamplingParams(), PROMPT), row)
    assert (nothing.logprob, nothing.top_logprobs) == (None, ())
    chosen = sample(Sampler(SamplingParams(num_logprobs=0), PROMPT), row)
    assert chosen.logprob == torch.log_softmax(row, dim=-1).max().item()
    assert chosen.top_logprobs == ()


def test_ties_are_broken_like_argmax() -> None:
    row = torch.zeros(50)
    row[[7, 30]] = 2.0
    assert sample(Sampler(SamplingParams(), []), row).token_id == int(row.argmax())


def test_prompt_ids_beyond_the_logits_are_no_trouble() -> None:
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.5)
    row = torch.tensor([0.0, 1.0, 1.1])
    assert sample(Sampler(params, [2, 3, 70_000], generated_ids=[9]), row).token_id == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("repetition_penalty", [1.0, 1.2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_logits_give_no_token(temperature: float, repetition_penalty: float, value: float) -> None:
    row = torch.zeros(9)
    row[4] = value
    sampler = Sampler(SamplingParams(temperature, repetition_penalty=repetition_penalty, seed=1), [4])
    with pytest.raises(NonFiniteOutput):
        sample(sampler, row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_logits_are_never_chosen(temperature: float) -> None:
    row = torch.full((9,), -float("inf"))
    with pytest.raises(NonFiniteOutput):
        sample(Sampler(SamplingParams(temperature), []), row)
    row[6] = -3.0
    assert sample(Sampler(SamplingParams(temperature), []), row).token_id == 6


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "field, values",
    [
        ("temperature", [-0.1, 1e-9, 101.0, NAN, INF]), ("top_k", [-1]), ("top_p", [0.0, -0.1, 1.1, NAN]),
        ("min_p", [-0.1, 1.1, NAN]), ("repetition_penalty", [0.0, -1.0, 101.0, NAN, INF]),
        ("presence_penalty", [-2.1, 2.1, NAN]), ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("seed", [2**64, -(2**63) - 1]), ("num_logprobs", [-1, MAX_LOGPROBS + 1]),
    ],
)  # fmt: skip
def test_a_field_out_of_range_is_refused_by_name(field: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert [name for name, _ in caught.value.violations] == [field]


def test_parameters_come_back_from_their_message() -> None:
    biases = {4: -1.5, 2: 0.25}
    given = SamplingParameters(
        temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, seed=5, logit_bias=biases,
    )  # fmt: skip
    assert len(given.ListFields()) == len(given.DESCRIPTOR.fields)
    params = SamplingParams.read(given, 5, num_logprobs=2)
    assert SamplingParams.read(params.message(), 5, num_logprobs=2, seed=5) == params
    assert params.message().logit_bias == biases
    greedy = SamplingParams(top_k=3)
    assert SamplingParams.read(greedy.message(), 5) == greedy
    with pytest.raises(InvalidRequest, match="below the vocabulary"):
        SamplingParams.read(given, 4)


def test_all_violations_are_named_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(temperature=-1.0, top_p=NAN)
    assert [name for name, _ in caught.value.violations] == ["temperature", "top_p"]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3),
        SamplingParams(temperature=1.0, top_k=40, seed=3, presence_penalty=1.0),
    ],
)
def test_a_fork_chooses_as_the_sampler_will_and_neither_disturbs_the_other(params: SamplingParams) -> None:
    logits = torch.randn(20, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))
    undisturbed, sampler = Sampler(params, PROMPT), Sampler(params, PROMPT)
    expected = [sample(undisturbed, row).token_id for row in logits]
    tokens = []
    for index, row in enumerate(logits):
        fork = sampler.fork()
        assert [sample(fork, each).token_id for each in logits[index:]] == expected[index:]
        tokens.append(sample(sampler, row).token_id)
    assert tokens == expected


def test_a_fork_may_read_logits_of_another_device() -> None:
    """A draft model's logits may be on a CPU, where those of the head are not."""
    sampler = Sampler(SamplingParams(temperature=0.0, logit_bias=((3, 5.0),)), ())
    assert sampler.biases(8, torch.device("meta")).device.type == "meta"
    assert sample(sampler.fork(), torch.zeros(8)).token_id == 3
