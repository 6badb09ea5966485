"""Answers of a given form are of it, whatever dies meanwhile, and those of the unsplit model under the same masks."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
import torch
from pydantic import BaseModel
from transformers import LogitsProcessorList

from corolla.chassis.errors import InvalidRequest
from corolla.client.text import formats
from corolla.decoding.grammar import AnswerGrammar
from corolla.decoding.grammar_text import grammar_tokenizer, read_grammar
from corolla.models.tokenizer import tokenizer_text
from corolla.sdk.client import Client
from corolla.sdk.results import FinishReason
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint
from tests.integration.deaths import answer_across_a_death
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.philox import services_draws
from tests.reference import Unsplit
from tests.tiers import quick

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "the thin man in the inner tent " * 2
SAMPLED: dict[str, Any] = {"temperature": 1.3, "seed": 11}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a cat", "a dog", None]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "home": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "kind", "ages", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"street": {"type": "string", "pattern": "^[A-Z][a-z]{2,6} [0-9]{1,3}$"}},
            "required": ["street"],
            "additionalProperties": False,
        }
    },
}
LARK = 'start: "<" word ("," word)~0..3 ">"\nword: /[a-z]{1,4}/'


class Point(BaseModel):
    x: bool
    label: str | None = None


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(model: Path) -> AsyncIterator[Swarm]:
    async with Swarm(model.parent, model, ["0:2", "2:5"], client={"adaptive_drafts": False}) as swarm:
        yield swarm


async def valid(swarm: Swarm, response_format: Any, **options: Any) -> str:
    async with swarm.connect() as client:
        answer = await client.generate(PROMPT, max_tokens=300, response_format=response_format, **options)
    assert answer.finish_reason is FinishReason.EOS
    return answer.text


WAYS = pytest.mark.parametrize(
    "mode, sampling",
    [
        ("off", {}),
        ("prompt_lookup", SAMPLED),
        pytest.param("off", SAMPLED, marks=pytest.mark.kind),
        pytest.param("prompt_lookup", {}, marks=pytest.mark.kind),
    ],
    ids=["greedy", "drafts sampled", "sampled", "drafts greedy"],
)


@WAYS
async def test_answers_are_of_their_form(swarm: Swarm, sampling: dict[str, Any], mode: str) -> None:
    options = {**sampling, "speculation": mode}
    jsonschema.validate(json.loads(await valid(swarm, schema_format(PERSON), **options)), PERSON)
    assert re.fullmatch(r"[0-9]{2,5}-(a|b)*x", await valid(swarm, {"type": "regex", "regex": "[0-9]{2,5}-(a|b){0,9}x"}))
    choices = ["yes", 'no "thanks"', "ümläut\n", "日本"]
    assert await valid(swarm, {"type": "choice", "choice": choices}, **options) in choices
    assert re.fullmatch(
        r"<[a-z]{1,4}(,[a-z]{1,4}){0,3}>", await valid(swarm, {"type": "lark", "lark": LARK}, **options)
    )
    jsonschema.validate(json.loads(await valid(swarm, Point, **options)), Point.model_json_schema())
    await swarm.until_empty()


async def test_any_object_and_a_chat_of_a_form(swarm: Swarm) -> None:
    async with swarm.connect() as client:
        answer = await client.generate(PROMPT, max_tokens=60, response_format={"type": "json_object"}, **SAMPLED)
        assert answer.text.startswith("{")
        if answer.finish_reason is FinishReason.EOS:
            assert isinstance(json.loads(answer.text), dict)
        async with client.chat(response_format=schema_format(PERSON), max_tokens=300) as chat:
            for question in ("who?", "and who else?"):
                jsonschema.validate(json.loads((await chat.send(question)).text), PERSON)


@WAYS
async def test_tokens_and_log_probabilities_are_those_of_the_unsplit_model(
    swarm: Swarm, model: Path, sampling: dict[str, Any], mode: str
) -> None:
    """Under the same biases, penalties and masks, in the order of `transformers`."""
    unsplit = Unsplit(model)
    prompt_ids = unsplit.encode(PROMPT)
    biases = {7: -3.5, 40: 4.25, 41: 2.0}
    text = tokenizer_text(unsplit.tokenizer)
    assert text is not None
    form = formats.json_schema(json.dumps(PERSON), "f")
    tokenizer = grammar_tokenizer(text, VOCAB_SIZE, unsplit.eos_token_ids)
    grammar = AnswerGrammar(read_grammar(tokenizer, formats.grammar_of(form).text))
    num_seen = len(prompt_ids)

    def mask(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal num_seen
        assert grammar.add_all(input_ids[0, num_seen:].tolist())
        num_seen = input_ids.shape[1]
        allowed = grammar.allowed()
        barred = [not allowed[index // 8] >> index % 8 & 1 for index in range(VOCAB_SIZE)]
        return scores.masked_fill(torch.tensor(barred), -torch.inf)

    ids = torch.tensor([prompt_ids])
    with services_draws(sampling.get("seed", 0)):
        output = unsplit.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=300, do_sample=bool(sampling), top_k=0,
            temperature=sampling.get("temperature"), repetition_penalty=1.2, pad_token_id=0, output_logits=True,
            sequence_bias=[[[token_id], bias] for token_id, bias in biases.items()], return_dict_in_generate=True,
            logits_processor=LogitsProcessorList([mask]), eos_token_id=list(unsplit.eos_token_ids),
        )  # fmt: skip
    expected = output.sequences[0, ids.shape[1] :].tolist()
    logprobs = torch.cat(output.logits).log_softmax(-1)
    async with swarm.connect() as client:
        got = await client.generate(
            prompt_ids, max_tokens=300, response_format=schema_format(PERSON), logit_bias=biases,
            repetition_penalty=1.2, logprobs=2, speculation=mode, **sampling,
        )  # fmt: skip
    assert list(got.token_ids) == expected
    for index, (token_id, each) in enumerate(zip(expected, got.logprobs, strict=True)):
        assert each.logprob == pytest.approx(float(logprobs[index, token_id]), abs=1e-4)
        assert [top.token_id for top in each.top] == logprobs[index].topk(2).indices.tolist()
    await swarm.until_empty()


async def test_what_a_grammar_forces_is_drafted(swarm: Swarm) -> None:
    """The prompt has nothing of it, and fewer passes give the same tokens."""
    schema = {**PERSON, "properties": {"a long name of a property": {"type": "boolean"}}}
    schema["required"] = ["a long name of a property"]
    async with swarm.connect() as client:
        plain, drafted = [
            await client.generate(PROMPT, response_format=schema_format(schema), max_tokens=99, speculation=mode)
            for mode in ("off", "prompt_lookup")
        ]
    assert drafted.token_ids == plain.token_ids
    assert drafted.usage.accepted_tokens >= 15


FORMS = {
    "schema": schema_format(PERSON),
    "regex": {"type": "regex", "regex": "[0-9]{2,5}-(a|b){0,9}x"},
    "choice": {"type": "choice", "choice": ["yes", 'no "thanks"', "日本"]},
    "lark": {"type": "lark", "lark": LARK},
}


@pytest.mark.parametrize("seed", quick([0, 1], kinds=(1,)), ids=["clone", "stranger"])
async def test_what_a_draft_model_drafts_of_a_form_changes_nothing(
    tmp_path: Path, model: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The drafter chooses under a copy of the answer's grammar, beyond its end, too; the answer's own goes no further
    than the answer."""
    draft_model = make_tiny_checkpoint("llama", tmp_path / "draft", seed=seed, num_blocks=5 if seed == 0 else 2)
    client_settings = {"adaptive_drafts": False, "max_draft_tokens": 4}
    num_drafted = num_accepted = 0
    async with (
        Swarm(
            tmp_path, model, ["0:2", "2:5"], server={"draft_model": str(draft_model)}, client=client_settings
        ) as swarm,
        swarm.connect() as client,
    ):
        for form in FORMS.values():
            for sampling in ({}, SAMPLED, {**SAMPLED, "repetition_penalty": 1.3, "logprobs": 1}):
                options: dict[str, Any] = {"response_format": form, "max_tokens": 300, **sampling}
                expected = await client.generate(PROMPT, **options, speculation="off")
                got = await client.generate(PROMPT, **options, speculation="draft_model")
                assert (got.token_ids, got.text, got.finish_reason) == (
                    expected.token_ids, expected.text, FinishReason.EOS,
                )  # fmt: skip
                num_drafted += got.usage.drafted_tokens
                num_accepted += got.usage.accepted_tokens
        await swarm.until_empty()
    assert num_drafted >= num_accepted > 0
    # What failed while it drafted would be written down, and the answer go on without drafts.
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


@pytest.mark.parametrize("hop", quick([0, 1], 1))
@pytest.mark.parametrize("mode", quick(["off", "prompt_lookup", "draft_model"], "prompt_lookup"))
@pytest.mark.parametrize("sampling", quick([{}, SAMPLED], SAMPLED), ids=["greedy", "sampled"])
async def test_an_answer_keeps_its_form_and_its_tokens_when_a_hop_dies(
    tmp_path: Path, model: Path, hop: int, mode: str, sampling: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"response_format": schema_format(PERSON), "max_tokens": 300, **sampling}
    client_settings = {"adaptive_drafts": False, "recovery_patience_s": 30.0}
    server_settings = {"prefix_cache": False, "draft_model": str(model)}
    async with (
        Swarm(tmp_path, model, ["0:2", "2:5"], server=server_settings, client=client_settings) as swarm,
        swarm.connect() as client,
    ):
        expected = await client.generate(PROMPT, **options, speculation="off")
        middle = expected.usage.prompt_tokens + len(expected.token_ids) // 2
        answer = await answer_across_a_death(swarm, client, hop, middle, PROMPT, **options, speculation=mode)
        assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
        jsonschema.validate(json.loads(answer.text), PERSON)


async def test_a_caller_learns_what_its_schema_asks_in_vain(swarm: Swarm) -> None:
    """The trailing metadata of whole answers and of streams names it."""
    odd = schema_format({"enum": [1], "not": {"const": 3}, "properties": {"ö, a": {"format": "decimal"}}})
    odd["json_schema"]["strict"] = False
    named = tuple(f"response_format.json_schema.{each}" for each in ("not", "properties.ö, a.format"))
    async with swarm.connect() as client:
        whole = await client.generate(PROMPT, response_format=odd)
        assert (whole.text, whole.ignored) == ("1", named)
        assert (await client.generate(PROMPT, response_format=schema_format(PERSON), max_tokens=1)).ignored == ()
        stream = client.stream_chat([{"role": "user", "content": "a"}], response_format=odd)
        async for _ in stream:
            assert stream.ignored == ()
        assert (stream.text, stream.ignored) == ("1", named)
    with Client(swarm.address) as blocking:
        reply = await asyncio.to_thread(blocking.complete_chat, [{"role": "user", "content": "a"}], response_format=odd)
        assert reply.ignored == named


@pytest.mark.parametrize("num_received", [1, 9])
async def test_an_answer_that_has_begun_is_continued(swarm: Swarm, num_received: int) -> None:
    options: dict[str, Any] = {"response_format": schema_format(PERSON), "max_tokens": 300, "temperature": 1.0}
    async with swarm.connect() as client:
        whole = await client.generate(PROMPT, request_id="formed", **options)
        received = whole.token_ids[:num_received]
        rest = await client.generate(PROMPT, request_id="formed", resume_from=received, **options)
        assert received + rest.token_ids == whole.token_ids
        with pytest.raises(InvalidRequest) as refused:
            await client.generate(PROMPT, request_id="formed", resume_from=[50, 50, 50], **options)
    assert [field for field, _ in refused.value.violations] == ["received.ids"]


NESTED: dict[str, Any] = {}
for _ in range(200):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    "response_format, field",
    [
        (schema_format({"not": {"type": "string"}}), "json_schema"),
        (schema_format({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "json_schema"),
        (schema_format({"type": "strange"}), "json_schema"),
        (schema_format({"$ref": "https://example.org/schema.json"}), "json_schema"),
        (schema_format({"description": "x" * (65 << 10)}), "json_schema"),
        (schema_format(NESTED), "json_schema"),
        (schema_format({"type": "integer", "minimum": 5, "maximum": 3}), "json_schema"),
        ({"type": "regex", "regex": "a(?=b)"}, "regex"),
        ({"type": "regex", "regex": "("}, "regex"),
        ({"type": "regex", "regex": ""}, "regex"),
        ({"type": "lark", "lark": "start: nothing"}, "lark"),
        ({"type": "lark", "lark": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "lark"),
        ({"type": "lark", "lark": "start: r0\n" + "".join(f"r{n}:r{n + 1}\n" for n in range(4000))}, "lark"),
        ({"type": "choice", "choice": []}, "choice.texts"),
        ({"type": "choice", "choice": ["a", ""]}, "choice.texts[1]"),
        ({"type": "choice", "choice": ["a"] * 257}, "choice.texts"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_no_answer_can_be_held_to_is_refused_before_anything_runs(
    swarm: Swarm, response_format: dict[str, Any], field: str
) -> None:
    ports = [server.metrics_port for server in swarm.servers]
    before = [await sample(port, "corolla_hop_tokens_total", kind="prefill") for port in ports]
    async with swarm.connect() as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.generate(PROMPT, response_format=response_format, max_tokens=5)
        assert [name for name, _ in refused.value.violations] == [f"response_format.{field}"]
        assert [await sample(port, "corolla_hop_tokens_total", kind="prefill") for port in ports] == before
        assert (await client.generate(PROMPT, response_format={"type": "choice", "choice": ["ok"]})).text == "ok"


@pytest.mark.parametrize(
    "options, fields",
    [
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, ["stopping.ignore_eos"]),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, ["sampling.logit_bias"]),
        ({"logit_bias": {3: 100.5}}, ["sampling.logit_bias"]),
        ({"logit_bias": {3: float("nan")}}, ["sampling.logit_bias"]),
    ],
)
async def test_options_that_contradict_are_refused(
    swarm: Swarm, options: dict[str, Any], fields: Sequence[str]
) -> None:
    async with swarm.connect() as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.generate(PROMPT, **options)
    assert [name for name, _ in refused.value.violations] == fields


async def test_a_bias_makes_a_token_certain_or_impossible(swarm: Swarm) -> None:
    async with swarm.connect() as client:
        free = await client.generate(PROMPT, max_tokens=6, ignore_eos=True, logprobs=0)
        chosen = set(free.token_ids)
        other = await client.generate(PROMPT, max_tokens=6, ignore_eos=True, logit_bias=dict.fromkeys(chosen, -100.0))
        only = await client.generate(PROMPT, max_tokens=6, ignore_eos=True, logit_bias={77: 100.0}, logprobs=0)
        several = await client.generate(PROMPT, max_tokens=6, n=2, ignore_eos=True, logit_bias={77: 100.0}, **SAMPLED)
    assert not chosen & set(other.token_ids)
    assert only.token_ids == (77,) * 6
    assert only.logprobs[0].logprob < free.logprobs[0].logprob
    assert [each.token_ids for each in several.completions] == [(77,) * 6] * 2
