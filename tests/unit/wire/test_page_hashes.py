import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.wire.beginnings import added, pack, unpack
from corolla.wire.page_hashes import HASH_BYTES, TextDigests, page_hashes

texts = st.lists(st.integers(0, 3), max_size=20)


def pages(text: list[int], page_tokens: int) -> list[bytes]:
    hashes = page_hashes(text, page_tokens)
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]


@given(texts, texts, st.integers(1, 4))
def test_digests_agree_just_as_far_as_the_texts(one: list[int], other: list[int], page_tokens: int) -> None:
    ones, others = pages(one, page_tokens), pages(other, page_tokens)
    assert (len(ones), len(others)) == (len(one) // page_tokens, len(other) // page_tokens)
    for number, (left, right) in enumerate(zip(ones, others, strict=False), 1):
        end = number * page_tokens
        assert (left == right) == (one[:end] == other[:end])


@given(texts, st.sampled_from([b"", b"a", b"b"]), st.sampled_from([b"", b"a", b"b"]), st.integers(1, 4))
def test_a_text_is_another_one_with_another_salt(text: list[int], one: bytes, other: bytes, page_tokens: int) -> None:
    ones, others = page_hashes(text, page_tokens, one), page_hashes(text, page_tokens, other)
    assert (ones == others) == (one == other or len(text) < page_tokens)


def test_digests_are_stable() -> None:
    # Client services of different versions meet in one cache. By `b2sum -l 128`.
    assert (
        page_hashes([1, 2, 3, 4, 5], 2).hex() == "2cc5e4d47c5f3c5fbe635a5a5b7bb392" + "66ca1890a7b0edaee5b40586c64fbba2"
    )


@given(st.lists(st.tuples(texts, st.sampled_from([b"", b"a"]), st.integers(1, 4))))
def test_a_text_that_goes_on_has_the_digests_of_the_whole_text(
    versions: list[tuple[list[int], bytes, int]],
) -> None:
    """So has one that is cut, or replaced by another one."""
    followed = TextDigests()
    for text, salt, page_tokens in versions:
        followed.follow(text)
        named = followed.of(page_tokens, salt)
        assert (named.num_tokens, named.page_hashes) == (len(text), page_hashes(text, page_tokens, salt))
        part = followed.of(page_tokens, salt, len(text) // 2)
        assert part.page_hashes == page_hashes(text[: len(text) // 2], page_tokens, salt)


def test_digests_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, compute = list[int](), hashlib.blake2b

    def count(data: bytes, digest_size: int) -> Any:
        hashed.append(len(data))
        return compute(data, digest_size=digest_size)

    monkeypatch.setattr(hashlib, "blake2b", count)
    text = TextDigests(list(range(100)))
    text.of(10)
    text.follow(list(range(125)))
    for _ in range(3):
        text.of(10)
    assert len(hashed) == 12
    assert text.followed_by(list(range(145))).of(10).num_tokens == 145
    assert (len(text), len(hashed)) == (125, 14)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=6, unique=True), st.integers(0, 6), st.integers(0, 6))
def test_what_is_announced_anew_comes_before_what_is_known(digests: list[int], first: int, evicted: int) -> None:
    before, now = digests[first:], [*digests[:evicted], *digests[evicted + 1 :]]
    assert unpack(added(pack(before), pack(now))) == tuple(each for each in now if each not in before)
