"""Stop sequences against a naive search over the whole text, and the order of the reasons to stop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.decoding.stopping import FinishReason, StopDecider, StopMatcher

FEW_LETTERS = "abé€"


def first_complete_match(text: str, sequences: list[str]) -> int | None:
    """Where the stop sequence begins that is complete first; the longest of those complete together."""
    for end in range(1, len(text) + 1):
        lengths = [len(sequence) for sequence in sequences if text[:end].endswith(sequence)]
        if lengths:
            return end - max(lengths)
    return None


@st.composite
def texts_in_pieces(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.text(FEW_LETTERS, max_size=5), max_size=12))


@given(texts_in_pieces(), st.lists(st.text(FEW_LETTERS, min_size=1, max_size=5), max_size=4))
def test_any_cutting_agrees_with_a_search_over_the_whole_text(pieces: list[str], sequences: list[str]) -> None:
    text = "".join(pieces)
    matcher = StopMatcher(sequences)
    emitted = ""
    matched = False
    for num_pieces, piece in enumerate(pieces, 1):
        free, matched = matcher.push(piece)
        emitted += free
        so_far = "".join(pieces[:num_pieces])
        assert so_far.startswith(emitted)
        if matched:
            break
        held = so_far[len(emitted) :]
        longest_open = max((n for s in sequences for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
        assert len(held) == longest_open, "held back more or less than the possible beginning of a stop sequence"
    if matched:
        assert matcher.push("more") == ("", True), "nothing leaves after a match"
    emitted += matcher.flush()
    assert matcher.flush() == ""

    start = first_complete_match(text, sequences)
    assert matched is (start is not None)
    assert matcher.matched in (sequences if matched else [""])
    assert start is None or text[start:].startswith(matcher.matched)
    assert emitted == (text if start is None else text[:start])


@pytest.mark.parametrize(
    "decider, token_id, num_generated_tokens, elapsed_s, expected",
    [
        (StopDecider(3), 5, 1, 0.0, None),
        (StopDecider(3), 5, 2, 1e9, None),
        (StopDecider(3), 5, 3, 0.0, FinishReason.LENGTH),
        (StopDecider(3, frozenset({2, 5})), 5, 1, 0.0, FinishReason.EOS),
        (StopDecider(3, frozenset({2, 5})), 5, 3, 0.0, FinishReason.EOS),
        (StopDecider(3, frozenset({5}), ignore_eos=True), 5, 1, 0.0, None),
        (StopDecider(3, frozenset({5}), ignore_eos=True), 5, 3, 0.0, FinishReason.LENGTH),
        (StopDecider(3, time_limit_s=2.0), 5, 1, 1.9, None),
        (StopDecider(3, time_limit_s=2.0), 5, 1, 2.0, FinishReason.TIME_LIMIT),
        (StopDecider(3, time_limit_s=2.0), 5, 3, 2.0, FinishReason.LENGTH),
    ],
)
def test_reason(
    decider: StopDecider, token_id: int, num_generated_tokens: int, elapsed_s: float, expected: FinishReason | None
) -> None:
    assert decider.finish_reason(token_id, num_generated_tokens, elapsed_s) is expected
