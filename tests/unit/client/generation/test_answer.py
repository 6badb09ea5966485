"""An answer as it grows, over a real tokenizer: tokens, text and the end."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.client.generation.answer import Answer
from corolla.client.generation.resumption import replay_answer
from corolla.client.output_parsing.deltas import Delta
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.parameters import SampledToken
from corolla.decoding.stopping import FinishReason, StopDecider
from tests.checkpoints import EOS, make_tokenizer

TOKENIZER = TextTokenizer(make_tokenizer())
EOS_ID = TOKENIZER.encode(EOS, add_special_tokens=False)[0]
PROMPT = TOKENIZER.encode("the thin man", add_special_tokens=False)
ENOUGH = 1000


def grown(
    token_ids: list[int], *, max_tokens: int = ENOUGH, stop: tuple[str, ...] = (), ignore_eos: bool = False,
    time_limit_s: float | None = None, every: int = 1,
) -> tuple[Answer, list[Delta]]:  # fmt: skip
    """An answer of these tokens, one second each, up to its end; its text is looked at `every` so many tokens."""
    decider = StopDecider(
        max_new_tokens=max_tokens, eos_token_ids=frozenset({EOS_ID}), ignore_eos=ignore_eos, time_limit_s=time_limit_s
    )
    answer = Answer(TOKENIZER, PROMPT, decider, stop)
    deltas: list[Delta] = []
    for number, token_id in enumerate(token_ids):
        answer.accept(SampledToken(token_id), float(number))
        if number % every == 0:
            deltas += answer.deltas()
        if answer.finish_reason is not None:
            break
    return answer, deltas + answer.deltas()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30))
def test_the_text_is_that_of_the_tokens_and_no_character_is_cut(text: str) -> None:
    answer, deltas = grown(ids(text), max_tokens=len(ids(text)))
    assert answer.text == "".join(delta.text for delta in deltas) == text
    assert "\ufffd" not in answer.text or "\ufffd" in text
    assert answer.token_ids == ids(text)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]


@given(
    st.text("abcé ", min_size=1, max_size=20),
    st.lists(st.text("abc ", min_size=1, max_size=4), max_size=2),
    st.booleans(),
)
def test_a_replayed_answer_has_the_text_and_the_end_of_the_first_one(text: str, stop: list[str], ends: bool) -> None:
    given_ids = [*ids(text), EOS_ID] if ends else ids(text)
    first, deltas = grown(given_ids, stop=tuple(stop), max_tokens=len(given_ids))
    assert first.finish_reason is not None
    replayed = Answer(TOKENIZER, PROMPT, StopDecider(max_new_tokens=ENOUGH, ignore_eos=True), tuple(stop))
    assert replay_answer(replayed, first.tokens, first.finish_reason) == deltas
    assert (replayed.text, replayed.finish_reason) == (first.text, first.finish_reason)


@given(
    st.text("abc ", min_size=1, max_size=30),
    st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
    st.integers(2, 9),
)
def test_it_does_not_matter_when_the_text_is_looked_at(text: str, stop: list[str], every: int) -> None:
    seen, deltas = grown(ids(text), stop=tuple(stop), max_tokens=len(ids(text)))
    seen_late, late_deltas = grown(ids(text), stop=tuple(stop), max_tokens=len(ids(text)), every=every)
    assert late_deltas == deltas
    assert (seen_late.token_ids, seen_late.text, seen_late.finish_reason) == (
        seen.token_ids, seen.text, seen.finish_reason
    )  # fmt: skip


@given(st.text("abc ", min_size=1, max_size=30), st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3))
def test_no_part_of_a_stop_sequence_is_ever_seen(text: str, stop: list[str]) -> None:
    answer, deltas = grown(ids(text), stop=tuple(stop), max_tokens=len(ids(text)))
    ends = [text.find(each) + len(each) for each in stop if each in text]
    if ends:
        assert deltas[-1].finish_reason is FinishReason.STOP_SEQUENCE
        assert deltas[-1].stop_sequence in stop
        assert text.startswith(answer.text + deltas[-1].stop_sequence)
        assert not any(each in answer.text for each in stop)
        assert text.startswith(answer.text)
    else:
        assert answer.text == text
        assert (deltas[-1].finish_reason, deltas[-1].stop_sequence) == (FinishReason.LENGTH, "")


def test_a_possible_stop_sequence_is_held_back_until_it_is_none_or_the_answer_ends() -> None:
    _, deltas = grown(ids("xSTOx"), stop=("STOP",), max_tokens=5)
    assert [delta.text for delta in deltas] == ["x", "", "", "", "STOx"]
    answer, deltas = grown(ids("xSTO"), stop=("STOP",), max_tokens=4)
    assert (answer.text, deltas[-1].text, deltas[-1].finish_reason) == ("xSTO", "STO", FinishReason.LENGTH)


@pytest.mark.parametrize(
    "token_ids, options, text, finish_reason",
    [
        # The model's own end is a token without text, and one that is ignored is a token like others.
        ([*ids("x"), EOS_ID, *ids("y")], {}, "x", FinishReason.EOS),
        ([*ids("x"), EOS_ID, *ids("y")], {"ignore_eos": True, "max_tokens": 3}, "xy", FinishReason.LENGTH),
        (ids("xyzxyz"), {"time_limit_s": 2.0}, "xyz", FinishReason.TIME_LIMIT),
    ],
)
def test_an_answer_ends_at_a_token_and_keeps_its_text(
    token_ids: list[int], options: dict[str, Any], text: str, finish_reason: FinishReason
) -> None:
    answer, deltas = grown(token_ids, **options)
    assert (answer.text, deltas[-1].finish_reason) == (text, finish_reason)
    assert answer.token_ids == token_ids[: len(deltas)]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_bytes_of_a_character_that_never_ends_are_shown_as_such(cut: int) -> None:
    answer, _ = grown(ids("x\N{GRINNING FACE}")[: 1 + cut], max_tokens=1 + cut)
    assert answer.text.startswith("x")
    assert set(answer.text[1:]) == {"\ufffd"}
