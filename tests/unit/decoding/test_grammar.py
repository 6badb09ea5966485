"""Answers under a grammar: whatever the logits say, they are of its form."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.chassis.errors import InvalidRequest, NonFiniteOutput
from corolla.client.text import formats
from corolla.decoding.grammar import AnswerGrammar
from corolla.decoding.grammar_text import UnreadableGrammar, grammar_tokenizer, read_grammar
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.prompt_lookup import PromptLookup
from corolla.decoding.sampling import Sampler, sample_together
from corolla.decoding.speculator import GrammarDrafter
from corolla.models.tokenizer import tokenizer_text
from tests.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.json_schemas import SCHEMAS, SUITE
from tests.sampled import sample

HF_TOKENIZER: Any = make_tokenizer()
END_ID: int = HF_TOKENIZER.convert_tokens_to_ids("<|end|>")
TOKENIZER = grammar_tokenizer(tokenizer_text(HF_TOKENIZER) or "", VOCAB_SIZE, [END_ID])
MOST_TOKENS = 500
# So that answers come to an end: what closes a string, a list or an object, and the end itself.
BIASES = tuple((each, 4.0) for each in sorted({END_ID, *HF_TOKENIZER.convert_tokens_to_ids(list('"}]'))}))
TOO_COMPLEX = 'start: (start start start| /[a-z ]/ | "" )*'


def grammar_of(schema: dict[str, Any]) -> AnswerGrammar:
    return AnswerGrammar(
        read_grammar(
            TOKENIZER, formats.grammar_of(formats.json_schema(json.dumps(schema), "schema", is_strict=True)).text
        )
    )


def of_lark(text: str) -> AnswerGrammar:
    return AnswerGrammar(read_grammar(TOKENIZER, formats.grammar_of(formats.lark(text, "lark")).text))


def logits_of(seed: int) -> torch.Tensor:
    return 2 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def answer(sampler: Sampler, seed: int) -> list[int]:
    """The tokens up to the end, which may not come."""
    token_ids: list[int] = []
    while len(token_ids) < MOST_TOKENS and END_ID not in token_ids[-1:]:
        token_ids.append(sample(sampler, logits_of(seed + len(token_ids))).token_id)
    return token_ids


def check(schema: dict[str, Any], params: SamplingParams, seed: int) -> bool:
    """Whether the answer, which is right, has come to an end."""
    token_ids = answer(Sampler(replace(params, logit_bias=BIASES), (), grammar=grammar_of(schema)), seed)
    if token_ids[-1] != END_ID:
        return False
    jsonschema.validate(json.loads(HF_TOKENIZER.decode(token_ids[:-1])), schema)
    return True


GREEDY, DRAWN = SamplingParams(repetition_penalty=1.1), SamplingParams(1.0, top_p=0.95, seed=3)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_answers_fit_the_schemas_of_the_public_suite(params: SamplingParams) -> None:
    whole = [check(each["schema"], params, seed=index) for index, each in enumerate(SUITE)]
    assert sum(whole) > 0.95 * len(SUITE) > 150


@settings(deadline=None, max_examples=60)
@given(schema=SCHEMAS, params=st.sampled_from([GREEDY, DRAWN]), seed=st.integers(0, 2**31))
def test_answers_fit_any_schema(schema: dict[str, Any], params: SamplingParams, seed: int) -> None:
    check(schema, params, seed)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "is_old": {"type": "boolean"}},
    "required": ["name", "is_old"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_sampler_that_is_made_anew_goes_on_with_the_same_tokens(params: SamplingParams) -> None:
    expected = answer(Sampler(params, (), grammar=grammar_of(SCHEMA)), seed=1)
    for num_generated in range(len(expected)):
        grammar, generated = grammar_of(SCHEMA), expected[:num_generated]
        assert grammar.add_all(generated)
        sampler = Sampler(params, (), generated_ids=generated, position=num_generated, grammar=grammar)
        rest = answer(sampler, seed=1 + num_generated)
        assert generated + rest == expected


def test_a_fork_goes_its_own_way() -> None:
    sampler = Sampler(DRAWN, (), grammar=grammar_of(SCHEMA))
    sample(sampler, logits_of(1))
    fork = sampler.fork()
    drafted = answer(fork, seed=2)
    assert answer(sampler, seed=2) == drafted


@given(seed=st.integers(0, 2**31), bars_ahead=st.booleans())
@settings(deadline=None, max_examples=20)
def test_rows_together_get_the_tokens_that_their_samplers_choose_alone(seed: int, bars_ahead: bool) -> None:
    def samplers() -> list[Sampler]:
        return [
            Sampler(GREEDY, (), grammar=grammar_of(SCHEMA)),
            Sampler(DRAWN, (), grammar=grammar_of(SCHEMA)),
            Sampler(replace(DRAWN, logit_bias=((7, -50.0), (300, 9.5)), num_logprobs=2), ()),
            Sampler(SamplingParams(), ()),
        ]

    alone, together = samplers(), samplers()
    for step in range(12):
        logits = torch.stack([logits_of(seed + 7 * step + index) for index in range(4)])
        untouched = logits.clone()
        if bars_ahead:
            for sampler in together:
                sampler.allowed()
        expected = [sample(sampler, row) for sampler, row in zip(alone, logits, strict=True)]
        assert sample_together(together, logits) == expected
        assert torch.equal(logits, untouched)


def test_a_grammar_that_becomes_too_complex_fails_its_own_row_only() -> None:
    samplers = [Sampler(GREEDY, (), grammar=of_lark(TOO_COMPLEX)), Sampler(GREEDY, (), grammar=grammar_of(SCHEMA))]
    words = torch.full((VOCAB_SIZE,), -50.0)
    words[HF_TOKENIZER.convert_tokens_to_ids(list("abcdefgh"))] = 50.0
    for step in range(200):
        failed, chosen = sample_together(samplers, torch.stack([words, logits_of(step)]))
        assert isinstance(chosen, SampledToken)
        if not isinstance(failed, SampledToken):
            assert isinstance(failed, InvalidRequest)
            with pytest.raises(InvalidRequest):
                sample(samplers[0], words)
            return
    pytest.fail("the grammar stays within the limits")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_noticed_where_the_grammar_bars_their_tokens(number: float) -> None:
    sampler, logits = Sampler(GREEDY, (), grammar=grammar_of(SCHEMA)), logits_of(1)
    logits[HF_TOKENIZER.convert_tokens_to_ids("x")] = number
    with pytest.raises(NonFiniteOutput):
        sample(sampler, logits)
    assert not isinstance(sample_together([sampler], logits.unsqueeze(0))[0], SampledToken)


def test_tokens_that_only_the_tokenizer_knows_bar_nothing() -> None:
    """A head may be smaller than the tokenizer's vocabulary, or larger."""
    for vocab_size in (VOCAB_SIZE, VOCAB_SIZE + 13):
        tokenizer = grammar_tokenizer(tokenizer_text(HF_TOKENIZER) or "", vocab_size, [END_ID])
        matcher = read_grammar(tokenizer, formats.grammar_of(formats.regex("[ab]{3}", "regex")).text)
        sampler = Sampler(DRAWN, (), grammar=AnswerGrammar(matcher))
        logits = torch.cat([logits_of(1), torch.full((vocab_size - VOCAB_SIZE,), 50.0)])
        text = HF_TOKENIZER.decode([sample(sampler, logits).token_id for _ in range(3)])
        assert set(text) <= {"a", "b"}


def drafts_after(grammar: AnswerGrammar, text: Sequence[int], num_tokens: int) -> list[int]:
    drafter = GrammarDrafter(PromptLookup(), grammar)
    drafter.extend(text)
    assert drafter.catch_up()
    if drafter.evidence is None:
        return []
    return drafter.draft(num_tokens, Sampler(GREEDY, ()))


def test_drafts_are_what_is_forced_or_else_what_is_possible() -> None:
    encode = HF_TOKENIZER.encode
    forced = of_lark('start: "the thin" /[ab]+/')
    assert HF_TOKENIZER.decode(drafts_after(forced, [], 50)).startswith("the thi")
    assert len(drafts_after(forced, [], 2)) == 2
    # The text goes on as it did before, as far as the grammar lets it.
    text = encode("abcabcaxyabcabca")
    assert HF_TOKENIZER.decode(drafts_after(of_lark('start: /[abcx]+/ "!"'), text, 9)) == "x"
    assert drafts_after(of_lark("start: /[0-9]+/"), text, 9) == []


@pytest.mark.parametrize(
    "text", ["", "no grammar", "{}", '{"grammars":[]}', '{"grammars":[{"lark_grammar":"start: b"}]}']
)
def test_what_is_no_grammar_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UnreadableGrammar) as refused:
        read_grammar(TOKENIZER, text)
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


def test_texts_of_any_bytes_are_read_or_refused() -> None:
    chosen = random.Random(5)
    for _ in range(300):
        text = "".join(chosen.choice('{}[]":,()|/abstr\\ \n\x00é<>%') for _ in range(chosen.randrange(80)))
        for grammar in (text, formats.grammar_of(formats.lark(text or "x", "f")).text):
            try:
                AnswerGrammar(read_grammar(TOKENIZER, grammar)).allowed()
            except (UnreadableGrammar, InvalidRequest):
                continue
