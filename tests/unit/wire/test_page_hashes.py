from hypothesis import given
from hypothesis import strategies as st

from corolla.wire.page_hashes import HASH_BYTES, page_hashes

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
