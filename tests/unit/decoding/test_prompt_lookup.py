"""Draft tokens from the text so far, against a search that looks at everything each time."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from corolla.decoding.prompt_lookup import LOOKUP_RATES, PromptLookup

MATCH_LENGTHS = (8, 5, 3, 2)


def searched(text: list[int], num_tokens: int) -> tuple[int | None, list[int]]:
    """The tokens after the latest earlier occurrence of the longest ending, repeated in a cycle at the end."""
    for kind, length in enumerate(MATCH_LENGTHS):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                follows = list(text[start + length :])
                while len(follows) < num_tokens:
                    follows.append(follows[len(follows) - (len(text) - start - length)])
                return kind, follows[:num_tokens]
    return None, []


def read_all(lookup: PromptLookup, token_ids: Iterable[int]) -> None:
    lookup.extend(token_ids)
    while not lookup.catch_up():
        pass


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12), st.integers(1, 60))
def test_prompt_lookup_agrees_with_a_full_search(text: list[int], num_tokens: int, first_part: int) -> None:
    lookup = PromptLookup()
    read_all(lookup, text[:first_part])
    read_all(lookup, text[first_part:])
    kind, follows = searched(text, num_tokens)
    assert lookup.evidence == kind
    assert lookup.draft(num_tokens, None) == follows


def test_prompt_lookup_drafts_for_a_repeating_text_only() -> None:
    lookup = PromptLookup()
    read_all(lookup, range(100))
    assert lookup.evidence is None
    assert lookup.draft(4, None) == []
    read_all(lookup, range(10, 20))
    assert lookup.evidence == 0
    assert lookup.draft(4, None) == [20, 21, 22, 23]


def test_the_index_grows_with_the_text_and_no_faster() -> None:
    lookup = PromptLookup()
    read_all(lookup, range(5000))
    assert lookup.num_indexed == tuple(5000 - length for length in MATCH_LENGTHS)
    assert len(LOOKUP_RATES) == len(MATCH_LENGTHS)
