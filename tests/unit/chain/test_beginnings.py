"""Which servers hold which beginnings: the longest one counts, salts keep texts apart, and old ones are dropped."""

import random

from corolla.chain.beginnings import STRIDE_TOKENS, Beginnings


def text_of(num_strides: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_strides * STRIDE_TOKENS)


def test_the_longest_beginning_of_each_server_counts() -> None:
    beginnings, text = Beginnings(), text_of(8)
    beginnings.remember(text[: 2 * STRIDE_TOKENS], b"", ["a", "b"])
    beginnings.remember(text[: 5 * STRIDE_TOKENS + 7], b"", ["b"])
    other = [*text[: 3 * STRIDE_TOKENS], *text_of(3, 1)]
    assert beginnings.held(text, b"") == {"b": 5 * STRIDE_TOKENS, "a": 2 * STRIDE_TOKENS}
    assert beginnings.held(other, b"") == {"b": 3 * STRIDE_TOKENS, "a": 2 * STRIDE_TOKENS}
    assert beginnings.held(text[: STRIDE_TOKENS - 1], b"") == {}


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
