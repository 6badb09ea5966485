"""Every way of decoding and every option that goes through a cache, on one small model."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.stopping_criteria import MaxTimeCriteria

from corolla.chassis.errors import CheckpointError, NoChain
from corolla.hf import AutoDistributedModelForCausalLM, DistributedLlamaForCausalLM, DistributedQwen2ForCausalLM
from corolla.hf.refusals import METHODS
from tests.checkpoints import make_tiny_checkpoint, make_tokenizer
from tests.integration.hf.models import Listing, ModelPair, draw_prompts, left_padding
from tests.integration.hf.stacks import Stacks
from tests.tiers import quick

FOREIGN = DynamicCache([(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))])
PROMPT = draw_prompts(1, 21)
BATCH, MASK = draw_prompts(4, 15), left_padding(15, 0, 3, 7, 14)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> ModelPair:
    folder = make_tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "llama")
    return ModelPair.load(folder, stacks.start(folder, ["0:2", "2:3", "3:5"]))


@pytest.fixture(autouse=True)
def nothing_stays(llama: ModelPair) -> Iterator[None]:
    yield
    llama.stack.until_empty()


class Forbid(LogitsProcessor):
    """Never the token that would win, once the text is longer than 25."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > 25:
            scores = scores.scatter(1, scores.argmax(dim=-1, keepdim=True), -torch.inf)
        return scores


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 30},
    "nucleus": {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.3},
    "min_p": {"do_sample": True, "min_p": 0.1, "no_repeat_ngram_size": 2},
    "five beams": {"num_beams": 5},
    "five beams of which three": {"num_beams": 5, "num_return_sequences": 3, "length_penalty": 0.5},
    "early stopping": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(40))},
    "beam sampling": {"num_beams": 4, "do_sample": True, "temperature": 1.5},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
    "logits processor": {"logits_processor": LogitsProcessorList([Forbid()])},
    "end tokens": {"eos_token_id": list(range(30)), "pad_token_id": 0},
    "guidance": {"guidance_scale": 1.5},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0), "do_sample": True},
    "watermark by choice": {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3, 4]),
        "do_sample": True,
    },
    "typical": {"do_sample": True, "typical_p": 0.9, "renormalize_logits": True},
    "biases": {"sequence_bias": {(10,): 4.0}, "exponential_decay_length_penalty": (2, 1.5)},
    "some tokens allowed": {"num_beams": 2, "prefix_allowed_tokens_fn": lambda row, text: list(range(50))},
    "without cache": {"use_cache": False},
    "a growing cache": {"cache_implementation": "dynamic"},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "bad words": {"bad_words_ids": [[token] for token in range(100, 200)]},
    "minimum": {"min_new_tokens": 8, "eos_token_id": list(range(60)), "pad_token_id": 0},
    "criteria": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(60)])},
}

ONE_ROW: dict[str, dict[str, Any]] = {
    "prompt lookup": {"prompt_lookup_num_tokens": 5},
    "sampled prompt lookup": {"prompt_lookup_num_tokens": 5, "do_sample": True},
    "stop strings": {"stop_strings": ["a", "e", "th", "5"], "tokenizer": make_tokenizer()},
    "negative prompt": {"guidance_scale": 2.0, "negative_prompt_ids": PROMPT[:, :6]},
}


@pytest.mark.parametrize("name", [*OPTIONS, *ONE_ROW])
def test_one_prompt(llama: ModelPair, name: str) -> None:
    llama.assert_equal(PROMPT.repeat(1, 2), max_new_tokens=14, **(OPTIONS | ONE_ROW)[name])


@pytest.mark.parametrize("name", quick(OPTIONS, *list(OPTIONS)[::4]))
def test_a_padded_batch(llama: ModelPair, name: str) -> None:
    llama.assert_equal(BATCH, attention_mask=MASK, max_new_tokens=9, **OPTIONS[name])


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 31, 256, 257, 490])
def test_prompts_of_every_length(llama: ModelPair, num_tokens: int) -> None:
    llama.assert_equal(draw_prompts(1, num_tokens), max_new_tokens=6)


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_assistant_drafts(llama: ModelPair, do_sample: bool) -> None:
    expected = llama.assert_equal(PROMPT, assistant_model=llama.unsplit, max_new_tokens=20, do_sample=do_sample)
    if not do_sample:
        assert expected.tolist() == llama.unsplit.generate(PROMPT, max_new_tokens=20).tolist()


def test_the_remote_model_may_be_the_assistant(llama: ModelPair) -> None:
    answered = llama.unsplit.generate(PROMPT, assistant_model=llama.remote, max_new_tokens=20)
    assert answered.tolist() == llama.unsplit.generate(PROMPT, max_new_tokens=20).tolist()


def test_drafts_end_with_the_text(llama: ModelPair) -> None:
    prompt = draw_prompts(1, 4).repeat(1, 8)
    with llama.remote.inference_session(max_length=33):
        answered = llama.remote.generate(prompt, max_new_tokens=1, prompt_lookup_num_tokens=8)
    assert answered.tolist() == llama.unsplit.generate(prompt, max_new_tokens=1).tolist()


def test_scores_and_logits_are_returned(llama: ModelPair) -> None:
    answered, expected = llama.both(
        PROMPT, max_new_tokens=6, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    assert type(answered) is type(expected)
    assert answered.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.cat(answered.scores), torch.cat(expected.scores), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(torch.cat(answered.logits), torch.cat(expected.logits), atol=2e-4, rtol=2e-4)


def test_beam_scores_and_indices_are_returned(llama: ModelPair) -> None:
    options: dict[str, Any] = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
    answered, expected = llama.both(PROMPT, max_new_tokens=6, output_logits=True, **options)
    assert answered.beam_indices.tolist() == expected.beam_indices.tolist()
    torch.testing.assert_close(answered.sequences_scores, expected.sequences_scores, atol=2e-4, rtol=2e-4)


def test_a_returned_cache_goes_on(llama: ModelPair) -> None:
    answer = llama.remote.generate(PROMPT, max_new_tokens=6, return_dict_in_generate=True)
    assert answer.past_key_values.get_seq_length() == 26
    further = llama.remote.generate(answer.sequences, past_key_values=answer.past_key_values, max_new_tokens=6)
    assert further.tolist() == llama.unsplit.generate(PROMPT, max_new_tokens=12).tolist()


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 4}], ids=["plain", "drafts"])
def test_tokens_are_streamed(llama: ModelPair, options: dict[str, Any]) -> None:
    collector, expected = Listing(), Listing()
    llama.remote.generate(PROMPT, max_new_tokens=6, streamer=collector, **options)
    llama.unsplit.generate(PROMPT, max_new_tokens=6, streamer=expected, **options)
    assert collector.puts == expected.puts
    assert collector.has_ended


def test_generate_without_a_prompt_begins_with_the_start_token(llama: ModelPair) -> None:
    llama.assert_equal(max_new_tokens=6)


def test_embeddings_with_padding(llama: ModelPair) -> None:
    embeddings = llama.unsplit.get_input_embeddings()(BATCH)
    llama.assert_equal(inputs_embeds=embeddings, attention_mask=MASK, max_new_tokens=6)


def test_defaults_come_from_the_checkpoint(llama: ModelPair) -> None:
    given, expected = llama.remote.generation_config.to_dict(), llama.unsplit.generation_config.to_dict()
    given.pop("transformers_version"), expected.pop("transformers_version")
    assert given == expected
    llama.assert_equal(PROMPT)


def test_arguments_may_be_given_by_place_or_by_name(llama: ModelPair) -> None:
    config, processors = GenerationConfig(max_new_tokens=6, num_beams=2), LogitsProcessorList([Forbid()])
    expected = llama.assert_equal(PROMPT, config, processors)
    named: dict[str, Any] = {"generation_config": config, "logits_processor": processors}
    for given in ({"inputs": PROMPT}, {"input_ids": PROMPT}):
        assert llama.assert_equal(**given, **named).tolist() == expected.tolist()
    with pytest.raises(TypeError, match="multiple values for generation_config"):
        llama.remote.generate(PROMPT, config, generation_config=config)
    with pytest.raises(TypeError, match="positional"):
        llama.remote.generate(*[None] * 20)
    with pytest.raises(ValueError, match="`session`"):
        llama.remote.generate(PROMPT, max_new_tokens=1, session=config)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 4}, {"use_cache": False}])
@pytest.mark.parametrize("token_id", [320, -1, 1 << 40])
def test_a_token_outside_the_vocabulary_is_named(llama: ModelPair, token_id: int, options: dict[str, Any]) -> None:
    text = PROMPT.clone()
    text[0, 5] = token_id
    with pytest.raises(ValueError, match=rf"`input_ids` .*token id {token_id} .*vocabulary.* 320"):
        llama.remote.generate(text, max_new_tokens=2, **options)


def test_a_session_stays_as_it_was_when_a_token_is_refused(llama: ModelPair) -> None:
    with llama.remote.inference_session() as session:
        llama.remote.generate(PROMPT, max_new_tokens=4)
        position, text = session.position, session.output_ids
        with pytest.raises(ValueError, match="token id 320"):
            llama.remote.generate(torch.tensor([[7, 320]]), max_new_tokens=4)
        assert session.position == position
        assert session.output_ids is text
        answer = llama.remote.generate(max_new_tokens=4)
    assert answer.tolist() == llama.unsplit.generate(PROMPT, max_new_tokens=8)[:, -4:].tolist()


def test_padding_may_be_any_number(llama: ModelPair) -> None:
    text = BATCH.masked_fill(MASK == 0, -1)
    expected = llama.unsplit.generate(BATCH, attention_mask=MASK, max_new_tokens=4)
    answer = llama.remote.generate(text, attention_mask=MASK, max_new_tokens=4)
    assert answer[:, 15:].tolist() == expected[:, 15:].tolist()


# --- one pass -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits_to_keep", [0, 1, 4, torch.tensor([2, 14])])
def test_a_pass_gives_logits_and_loss(llama: ModelPair, logits_to_keep: int | Tensor) -> None:
    output = llama.remote(BATCH, attention_mask=MASK, logits_to_keep=logits_to_keep)
    position_ids = (MASK.cumsum(-1) - 1).clamp(min=0)
    expected = llama.unsplit(BATCH, attention_mask=MASK, position_ids=position_ids, logits_to_keep=logits_to_keep)
    assert output.logits.shape == expected.logits.shape
    columns = torch.arange(15)[-logits_to_keep:] if isinstance(logits_to_keep, int) else logits_to_keep
    counts = MASK[:, columns].bool()
    torch.testing.assert_close(output.logits[counts], expected.logits[counts], atol=2e-4, rtol=2e-4)
    assert not output.logits[~counts].any()


def test_a_pass_gives_a_loss(llama: ModelPair) -> None:
    given = llama.remote(PROMPT, labels=PROMPT, use_cache=False)
    assert given.past_key_values is None
    torch.testing.assert_close(given.loss, llama.unsplit(PROMPT, labels=PROMPT).loss, atol=1e-4, rtol=1e-4)
    loss, logits = llama.remote(PROMPT, labels=PROMPT, use_cache=False, return_dict=False)
    assert logits.shape == (1, 21, given.logits.shape[-1])
    assert loss == given.loss


def test_passes_go_on_from_a_cache_that_grows(llama: ModelPair) -> None:
    prompt = draw_prompts(2, 300)
    cache = None
    rows: list[Tensor] = []
    for chunk in torch.split(prompt, [100, 1, 199], dim=1):
        output = llama.remote(chunk, past_key_values=cache)
        cache, rows = output.past_key_values, [*rows, output.logits]
    expected = llama.unsplit(prompt).logits
    torch.testing.assert_close(torch.cat(rows, dim=1), expected, atol=5e-4, rtol=5e-4)


def test_the_cache_repeats_and_selects_rows(llama: ModelPair) -> None:
    cache = llama.remote(BATCH).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([7, 0, 5]))
    cache.crop(-1)
    assert (cache.batch_size, cache.get_seq_length()) == (3, 14)
    rows = BATCH[[3, 0, 2]]
    output = llama.remote(rows[:, 14:], past_key_values=cache)
    torch.testing.assert_close(output.logits, llama.unsplit(rows).logits[:, 14:], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"past_key_values": FOREIGN}, "past_key_values"),
        ({"past_key_values": (FOREIGN,)}, "past_key_values"),
        ({"position_ids": torch.arange(5, 26)[None]}, "position_ids"),
        ({"position_ids": torch.arange(20)[None]}, "position_ids"),
        ({"position_ids": torch.arange(21).expand(3, 1, 21)}, "position_ids"),
        ({"attention_mask": torch.ones(1, 20)}, "attention_mask"),
        ({"attention_mask": torch.ones(1, 1, 21, 21)}, "attention_mask"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask"),
        ({"attention_mask": torch.arange(21)[None] % 5, "labels": PROMPT, "position_ids": None}, "labels"),
        ({"inputs_embeds": torch.zeros(1, 2, 64)}, "inputs_embeds"),
    ],
)
def test_a_pass_refuses_by_name(llama: ModelPair, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        llama.remote(PROMPT, **arguments)


def test_an_empty_cache_of_transformers_is_filled(llama: ModelPair) -> None:
    """The caller goes on with the object that it made."""
    expected = llama.unsplit.generate(PROMPT, max_new_tokens=12)
    for cache in (DynamicCache(), DynamicCache(config=llama.remote.config)):
        llama.remote(PROMPT[:, :15], past_key_values=cache)
        assert (cache.get_seq_length(), len(cache)) == (15, 5)
        first = llama.remote.generate(PROMPT, past_key_values=cache, max_new_tokens=6)
        assert first.tolist() == expected[:, :27].tolist()
        assert cache.get_seq_length() == 26
        assert llama.remote.generate(first, past_key_values=cache, max_new_tokens=6).tolist() == expected.tolist()
    cache = DynamicCache()
    llama.remote.generate(PROMPT, past_key_values=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 22


def test_a_copied_cache_goes_its_own_way(llama: ModelPair) -> None:
    cache = llama.remote(BATCH[:, :10], attention_mask=MASK[:, :10]).past_key_values
    cache.reorder_cache(torch.tensor([3, 1, 0, 2]))
    twin = copy.deepcopy(copy.deepcopy(cache))
    rows, mask = BATCH[[3, 1, 0, 2]], MASK[[3, 1, 0, 2]]
    expected = llama.unsplit(rows, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    for each, chunks in ((cache, (5,)), (twin, (2, 3))):
        logits, start = [], 10
        for num_tokens in chunks:
            end = start + num_tokens
            output = llama.remote(rows[:, start:end], attention_mask=mask[:, :end], past_key_values=each)
            logits.append(output.logits)
            start = end
        at = mask[:, 10:].bool()
        torch.testing.assert_close(torch.cat(logits, 1)[at], expected[:, 10:][at], atol=2e-4, rtol=2e-4)
    cache.session.close()
    assert twin.get_seq_length() == 15
    with pytest.raises(TypeError, match="pickled"):
        twin.__reduce_ex__(2)


def test_a_pass_after_padding_needs_the_same_mask(llama: ModelPair) -> None:
    cache = llama.remote(BATCH[:, :10], attention_mask=MASK[:, :10]).past_key_values
    for mask in (None, torch.ones_like(MASK)):
        with pytest.raises(ValueError, match="`attention_mask`"):
            llama.remote(BATCH[:, 10:], attention_mask=mask, past_key_values=cache)


def test_a_configuration_that_asks_for_more_is_refused(llama: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.remote.config, "output_hidden_states", True)
    with pytest.raises(ValueError, match="`output_hidden_states`"):
        llama.remote(PROMPT)


@pytest.mark.parametrize("token_id", [320, -1])
@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_a_pass_names_a_token_outside_the_vocabulary(llama: ModelPair, name: str, token_id: int) -> None:
    text = PROMPT.clone()
    text[0, 5] = token_id
    with pytest.raises(ValueError, match=rf"`{name}` .*token id {token_id} .*vocabulary.* 320"):
        llama.remote(**{"input_ids": PROMPT, "labels": PROMPT, name: text})


def test_labels_may_leave_tokens_out(llama: ModelPair) -> None:
    labels = PROMPT.clone()
    labels[0, :5] = -100
    loss = llama.remote(PROMPT, labels=labels, use_cache=False).loss
    torch.testing.assert_close(loss, llama.unsplit(PROMPT, labels=labels).loss, atol=1e-4, rtol=1e-4)


# --- the model ----------------------------------------------------------------------------------------------------


def test_the_model_is_one_of_transformers(llama: ModelPair) -> None:
    model: Any = llama.remote
    assert model.train(False) is model
    assert not model.training
    assert model.to("cpu") is model
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert model.config.num_hidden_layers == len(model.blocks) == 5
    assert model.config.to_dict() == llama.unsplit.config.to_dict() | {"_name_or_path": model.config.name_or_path}
    tensors = {tuple(parameter.shape) for parameter in model.parameters()}
    assert tensors == {(320, 64), (64,)}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.base_model is model.get_decoder() is model
    for refused in METHODS:
        with pytest.raises(ValueError, match=f"`{refused}` is not supported over remote blocks: "):
            getattr(model, refused)()
    for change in (model.half, model.bfloat16, lambda: model.to(torch.float64), model.train):
        with pytest.raises(ValueError, match=r"block servers|gradients"):
            change()
    assert copy.deepcopy(model).to("meta").edges.device.type == "meta"
    with pytest.raises(ValueError, match="`weight`"):
        model.set_input_embeddings(torch.nn.Embedding(320, 32))
    with pytest.raises(ValueError, match=r"torch\.float32"):
        model.set_output_embeddings(torch.nn.Linear(64, 320, dtype=torch.float16))


def test_a_copied_model_steps_through_the_same_servers(llama: ModelPair) -> None:
    twin: Any = copy.deepcopy(llama.remote)
    twin.get_input_embeddings().weight.zero_()
    assert twin.blocks.remote.connection is llama.remote.blocks.remote.connection
    llama.assert_equal(PROMPT, max_new_tokens=3)
    assert twin.generate(PROMPT, max_new_tokens=3).shape == (1, 24)


def test_classes_are_for_their_families(llama: ModelPair) -> None:
    folder, router = str(llama.remote.config.name_or_path), llama.stack.router
    assert isinstance(llama.remote, DistributedLlamaForCausalLM)
    assert isinstance(DistributedLlamaForCausalLM.from_config(llama.unsplit.config, router=router), type(llama.remote))
    with pytest.raises(CheckpointError, match="'llama'"):
        DistributedQwen2ForCausalLM.from_pretrained(folder, router=router)
    with pytest.raises(TypeError):
        AutoDistributedModelForCausalLM()


def test_a_folder_may_have_another_name_than_on_the_servers(llama: ModelPair, tmp_path: Path) -> None:
    folder = shutil.copytree(str(llama.remote.config.name_or_path), tmp_path / "mine")
    model = AutoDistributedModelForCausalLM.from_pretrained(str(folder), router=llama.stack.router)
    expected = llama.unsplit.generate(PROMPT, max_new_tokens=3)
    assert model.generate(PROMPT, max_new_tokens=3).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "options, differs, unknown",
    [
        ({"dtype": "bfloat16"}, r"dtype \(float32 there, bfloat16 here\)", {"dtype": "float64"}),
        (
            {"dtype": "fp32", "quantization": "int8"},
            r"quantization \(none there, int8 here\)",
            {"quantization": "int3"},
        ),
    ],
    ids=["dtype", "quantization"],
)
def test_servers_with_other_numbers_are_no_chain(
    llama: ModelPair, options: dict[str, Any], differs: str, unknown: dict[str, Any]
) -> None:
    folder, router = str(llama.remote.config.name_or_path), llama.stack.router
    model = AutoDistributedModelForCausalLM.from_pretrained(folder, router=router, **options)
    with pytest.raises(NoChain, match=differs):
        model.generate(PROMPT, max_new_tokens=1)
    with pytest.raises(ValueError, match=next(iter(unknown))):
        AutoDistributedModelForCausalLM.from_pretrained(folder, router=router, **unknown)
