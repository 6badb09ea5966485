"""Which servers hold which beginnings: the longest one counts, salts keep texts apart, and old ones are dropped."""

import random

from corolla.chain.beginnings import STRIDE_TOKENS, Beginnings, named_beginnings
from corolla.wire.beginnings import pack
from corolla.wire.page_hashes import TextDigests


def tokens_of(num_strides: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_strides * STRIDE_TOKENS)


def text_of(num_strides: int, seed: int = 0) -> TextDigests:
    return TextDigests(tokens_of(num_strides, seed))


def test_the_longest_beginning_of_each_server_counts() -> None:
    beginnings, text = Beginnings(), text_of(8)
    beginnings.remember(text.until(2 * STRIDE_TOKENS), b"", ["a", "b"])
    beginnings.remember(text.until(5 * STRIDE_TOKENS + 7), b"", ["b"])
    other = TextDigests([*tokens_of(8)[: 3 * STRIDE_TOKENS], *tokens_of(3, 1)])
    assert beginnings.held(text, b"") == {"b": 5 * STRIDE_TOKENS, "a": 2 * STRIDE_TOKENS}
    assert beginnings.held(other, b"") == {"b": 3 * STRIDE_TOKENS, "a": 2 * STRIDE_TOKENS}
    assert beginnings.held(text.until(STRIDE_TOKENS - 1), b"") == {}


def test_texts_of_other_salts_never_meet() -> None:
    beginnings, text = Beginnings(), text_of(2)
    beginnings.remember(text, b"alice", ["a"])
    assert beginnings.held(text, b"bob") == {}
    assert beginnings.held(text, b"alice") == {"a": 2 * STRIDE_TOKENS}


def test_the_ends_of_the_oldest_texts_are_dropped_first() -> None:
    beginnings, old, new = Beginnings(most=6), text_of(4), text_of(4, 1)
    beginnings.remember(old, b"", ["a"])
    beginnings.remember(new, b"", ["b"])
    assert beginnings.held(old, b"") == {"a": 2 * STRIDE_TOKENS}
    assert beginnings.held(new, b"") == {"b": 4 * STRIDE_TOKENS}


def test_the_servers_of_many_texts_with_one_beginning_are_bounded() -> None:
    beginnings, text = Beginnings(), text_of(1)
    for number in range(1000):
        beginnings.remember(text, b"", [f"s{number}"])
    held = beginnings.held(text, b"")
    assert len(held) == 32
    assert "s999" in held, "those that had it last are remembered"


def test_what_a_server_announces_is_found_by_who_has_the_text_and_the_salt() -> None:
    """A text goes on from another one's prompt or end, or from where a third one left that."""
    text, beginnings = text_of(8), Beginnings()
    ends = 2 * STRIDE_TOKENS + 9, 5 * STRIDE_TOKENS, 8 * STRIDE_TOKENS, 0, 99 * STRIDE_TOKENS
    named = list(named_beginnings(text, b"salt", ends))
    assert [each.num_tokens for each in named] == [2 * STRIDE_TOKENS, 5 * STRIDE_TOKENS, 8 * STRIDE_TOKENS]
    beginnings.hear("a", pack(each.digest for each in named))
    beginnings.remember(text.until(3 * STRIDE_TOKENS), b"salt", ["b"])
    for num_tokens, num_held in ((8, 8), (7, 5), (2, 2), (1, 0)):
        held = beginnings.held(text.until(num_tokens * STRIDE_TOKENS), b"salt")
        assert held.get("a", 0) == num_held * STRIDE_TOKENS
    assert beginnings.held(text, b"salt")["b"] == 3 * STRIDE_TOKENS
    assert beginnings.held(text, b"other") == beginnings.held(text_of(8, 1), b"salt") == {}


def test_what_servers_announce_takes_no_place_of_the_texts_of_this_process() -> None:
    beginnings, text, other = Beginnings(most=8, most_heard=8), text_of(8), text_of(2, 1)
    beginnings.remember(text, b"", ["a"])
    for number in range(99):
        beginnings.hear(f"s{number}", pack([2 * number, 2 * number + 1]))
    assert beginnings.held(text, b"") == {"a": 8 * STRIDE_TOKENS}
    beginnings.hear("b", pack(each.digest for each in named_beginnings(text, b"", [5 * STRIDE_TOKENS])))
    beginnings.hear("b", pack(each.digest for each in named_beginnings(other, b"", [2 * STRIDE_TOKENS])))
    assert beginnings.held(text, b"") == {"a": 8 * STRIDE_TOKENS, "b": 5 * STRIDE_TOKENS}
    assert beginnings.held(other, b"") == {"b": 2 * STRIDE_TOKENS}
