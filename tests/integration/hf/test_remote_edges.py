"""A model of which nothing is here: embedding, head and sampling on the block servers, ids on the way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from corolla.chassis.errors import NoChain
from corolla.hf import AutoDistributedModelForCausalLM, RemoteModelForCausalLM
from tests.checkpoints import CONTEXT_LENGTH, make_tiny_checkpoint, make_tokenizer
from tests.integration.hf.models import Listing, draw_prompts, left_padding
from tests.integration.hf.stacks import Stack, Stacks
from tests.reference import Sampling, Unsplit

PROMPT = draw_prompts(1, 21)
BATCH, MASK = draw_prompts(4, 15), left_padding(15, 0, 3, 7, 14)
NUM_SEEDS = 2**63 - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture(scope="module")
def stack(folder: Path, stacks: Stacks) -> Stack:
    return stacks.start(folder, ["0:2", "2:3", "3:5"])


@pytest.fixture(scope="module")
def unsplit(folder: Path) -> Unsplit:
    return Unsplit(folder)


@pytest.fixture(scope="module")
def remote(folder: Path, stack: Stack) -> RemoteModelForCausalLM:
    return AutoDistributedModelForCausalLM.from_pretrained(str(folder), edges="remote", router=stack.router)


@pytest.fixture(autouse=True)
def nothing_stays(stack: Stack) -> Iterator[None]:
    yield
    stack.until_empty()


class EndsAt(StoppingCriteria):
    """Ends a row at a length, counted with the prompt's padding."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self._num_columns)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "end tokens": {"eos_token_id": list(range(30)), "pad_token_id": 0},
    "criteria": {"stopping_criteria": StoppingCriteriaList([EndsAt(25)])},
    "much time": {"max_time": 60.0},
    "no cache asked for": {"use_cache": True, "num_beams": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_answer_as_unsplit(remote: RemoteModelForCausalLM, unsplit: Unsplit, name: str) -> None:
    call = {"attention_mask": MASK, "max_new_tokens": 40, **OPTIONS[name]}
    assert remote.generate(BATCH, **call).tolist() == unsplit.model.generate(BATCH, **call).tolist()


def test_padding_is_found_as_transformers_finds_it(remote: RemoteModelForCausalLM, unsplit: Unsplit) -> None:
    text = BATCH.masked_fill(MASK == 0, 3)
    cases: list[dict[str, Any]] = [{"pad_token_id": 3}, {"pad_token_id": 3, "eos_token_id": 3}, {}]
    for options in cases:
        expected = unsplit.model.generate(text, max_new_tokens=6, **options)
        assert remote.generate(text, max_new_tokens=6, **options).tolist() == expected.tolist(), options


def test_the_tokenizer_is_found_by_the_models_name(remote: RemoteModelForCausalLM) -> None:
    assert (Path(remote.name_or_path) / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 30},
        {"prompt_lookup_num_tokens": 5, "max_new_tokens": 20},
        {"stop_strings": ["a", "e", "th", "5"], "tokenizer": make_tokenizer(), "max_new_tokens": 30},
        {},
    ],
    ids=["length of all", "prompt lookup", "stop strings", "nothing said"],
)
def test_one_prompt_answers_as_unsplit(
    remote: RemoteModelForCausalLM, unsplit: Unsplit, options: dict[str, Any]
) -> None:
    prompt = draw_prompts(1, 6).repeat(1, 3)
    assert remote.generate(prompt, **options).tolist() == unsplit.model.generate(prompt, **options).tolist()


@pytest.mark.parametrize("num_tokens", [1, 2, 257, 480])
def test_prompts_of_every_length(remote: RemoteModelForCausalLM, unsplit: Unsplit, num_tokens: int) -> None:
    prompt = draw_prompts(1, num_tokens)
    answered = remote.generate(input_ids=prompt, max_new_tokens=6)
    assert answered.tolist() == unsplit.model.generate(prompt, max_new_tokens=6).tolist()


def test_sampled_rows_draw_from_seeds_of_their_own(remote: RemoteModelForCausalLM, unsplit: Unsplit) -> None:
    sampling: Sampling = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.1}
    torch.manual_seed(5)
    seeds = torch.randint(NUM_SEEDS, (3,)).tolist()
    expected = [
        unsplit.generate(PROMPT[0].tolist(), 24, sampling | {"seed": seed}, ignore_eos=True).token_ids for seed in seeds
    ]
    for _ in range(2):
        torch.manual_seed(5)
        answered = remote.generate(
            PROMPT, do_sample=True, num_return_sequences=3, max_new_tokens=24, eos_token_id=None, **sampling
        )
        assert answered[:, PROMPT.shape[1] :].tolist() == expected
    assert len(set(map(tuple, expected))) == 3


def test_a_streamer_gets_the_prompt_then_tokens(remote: RemoteModelForCausalLM) -> None:
    streamer = Listing()
    answered = remote.generate(PROMPT, max_new_tokens=9, streamer=streamer)
    assert streamer.puts[0] == PROMPT[0].tolist()
    assert [token_id for put in streamer.puts for token_id in put] == answered[0].tolist()
    assert len(streamer.puts) == 10
    assert streamer.has_ended


def test_an_interrupt_frees_everything(remote: RemoteModelForCausalLM, stack: Stack) -> None:
    with pytest.raises(KeyboardInterrupt):
        remote.generate(PROMPT, max_new_tokens=400, streamer=Listing(interrupted_at=5))
    stack.until_empty()
    assert remote.generate(PROMPT, max_new_tokens=2).shape == (1, 23)


def test_prompts_may_be_reused(folder: Path, stack: Stack, unsplit: Unsplit) -> None:
    remote = RemoteModelForCausalLM.from_pretrained(str(folder), router=stack.router, tenant="a", reuse_prefixes=True)
    prompt = draw_prompts(1, 100)
    expected = unsplit.model.generate(prompt, max_new_tokens=5).tolist()
    assert [remote.generate(prompt, max_new_tokens=5).tolist() for _ in range(3)] == [expected] * 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, "`num_beams` is not supported with remote edges"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "`output_scores` is not supported"),
    "processor": ({"logits_processor": LogitsProcessorList([])}, "`logits_processor` is not supported"),
    "minimum": ({"min_new_tokens": 3}, "`min_new_tokens` is not supported"),
    "typical": ({"typical_p": 0.9, "do_sample": True}, "`typical_p` is not supported"),
    "unknown": ({"max_new_tokenz": 3}, "`max_new_tokenz` is not supported"),
    "greedy copies": ({"num_return_sequences": 2}, "do not support `num_return_sequences`"),
    "cold": ({"do_sample": True, "temperature": 0.0}, "`temperature` must be above 0"),
    "hot": ({"do_sample": True, "temperature": 1e9}, "must be 0 .greedy. or between"),
    "no tokenizer": ({"stop_strings": ["a"]}, "`stop_strings` needs"),
    "too long": ({"inputs": torch.full((1, 600), 5)}, "leaves no room in the model's context"),
    "no room": ({"max_length": 21}, "there is no room for a new one"),
    "outside": ({"inputs": torch.tensor([[5, 99_999]])}, "has the token id 99999 outside"),
    "empty": ({"inputs": torch.empty(1, 0, dtype=torch.int64)}, "at least one token"),
    "padding on the right": ({"attention_mask": torch.tensor([[1] * 20 + [0]])}, "padding is on the left"),
    "mask of another shape": ({"attention_mask": torch.ones(1, 3)}, "must have the shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_logits_here_is_refused(remote: RemoteModelForCausalLM, name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        remote.generate(**({"inputs": PROMPT} | call))


def test_an_answer_may_reach_the_end_of_the_context(remote: RemoteModelForCausalLM, unsplit: Unsplit) -> None:
    prompt = draw_prompts(1, CONTEXT_LENGTH - 3)
    got = remote.generate(prompt, max_new_tokens=10_000)
    assert got.tolist() == unsplit.model.generate(prompt, max_new_tokens=3).tolist()


def test_a_stream_of_several_rows_is_refused(remote: RemoteModelForCausalLM) -> None:
    with pytest.raises(ValueError, match="single row"):
        remote.generate(BATCH, streamer=Listing())


def test_edges_are_local_or_remote(folder: Path) -> None:
    library: Any = AutoDistributedModelForCausalLM
    with pytest.raises(ValueError, match="`edges` must be"):
        library.from_pretrained(str(folder), edges="nowhere")


def test_a_model_that_nobody_serves(folder: Path, stack: Stack) -> None:
    remote = RemoteModelForCausalLM.from_pretrained(str(folder), router=stack.router, dtype="bfloat16")
    with pytest.raises(NoChain):
        remote.generate(PROMPT, max_new_tokens=2)
