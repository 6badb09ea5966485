"""Streaming equals decoding in one go, for any tokens and every kind of tokenizer."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from corolla.client.text.detokenizer import REPLACEMENT, Detokenizer
from corolla.client.text.tokenizer import TextTokenizer

TEXTS = st.text(st.sampled_from("ab e Tth.,\n  é你好世界한😀👩\u200d👧🎉ก็ํ\u0301<"), max_size=40)
IDS = st.lists(st.integers(0, 1 << 30), max_size=120)


def streamed(tokenizer: TextTokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    return [*pieces, detokenizer.flush()]


def decoded(tokenizer: TextTokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> str:
    return tokenizer.decode([*prompt_ids, *ids])[len(tokenizer.decode(prompt_ids)) :]


@given(raw_ids=IDS, prompt=TEXTS)
@example(raw_ids=[], prompt="")
def test_byte_level_is_exact_for_any_ids(byte_level_tokenizer: TextTokenizer, raw_ids: list[int], prompt: str) -> None:
    # Most random ids do not make UTF-8, and some are special tokens between the bytes of one character.
    ids = [raw_id % byte_level_tokenizer.vocab_size for raw_id in raw_ids]
    prompt_ids = byte_level_tokenizer.encode(prompt)
    pieces = streamed(byte_level_tokenizer, ids, prompt_ids)
    assert "".join(pieces) == decoded(byte_level_tokenizer, ids, prompt_ids)


@given(data=st.data(), text=TEXTS)
def test_byte_level_is_exact_for_broken_utf8(
    byte_level_tokenizer: TextTokenizer, data: st.DataObject, text: str
) -> None:
    encoded = text.encode()
    some_bytes = data.draw(
        st.lists(st.one_of(st.sampled_from(encoded or b"\x80"), st.integers(128, 255)), max_size=100)
    )
    by_byte = single_byte_ids(byte_level_tokenizer)
    ids = [by_byte[byte] for byte in some_bytes]
    assert "".join(streamed(byte_level_tokenizer, ids)) == bytes(some_bytes).decode(errors="replace")


def single_byte_ids(tokenizer: TextTokenizer) -> dict[int, int]:
    """Byte -> the id that stands for it alone."""
    # The byte-level alphabet: printable Latin-1 stands for itself, the rest for U+0100 and on, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, num_others = {}, 0
    for byte in range(256):
        letters[byte] = chr(byte) if byte in printable else chr(256 + num_others)
        num_others += byte not in printable
    vocabulary = tokenizer.hf_tokenizer.get_vocab()
    return {byte: vocabulary[letter] for byte, letter in letters.items()}


@given(texts=st.lists(TEXTS, max_size=4), prompt=TEXTS, special=st.integers(0, 1 << 30))
def test_any_tokenizer_is_exact_for_texts(
    any_tokenizer: TextTokenizer, texts: list[str], prompt: str, special: int
) -> None:
    special_ids = sorted(any_tokenizer.special_token_ids)
    ids: list[int] = []
    for text in texts:
        ids += [*any_tokenizer.encode(text, add_special_tokens=False), special_ids[special % len(special_ids)]]
    prompt_ids = any_tokenizer.encode(prompt)
    pieces = streamed(any_tokenizer, ids, prompt_ids)
    assert "".join(pieces) == decoded(any_tokenizer, ids, prompt_ids)
    assert all(REPLACEMENT not in piece for piece in pieces), "a character was split"


@given(raw_ids=IDS, prompt=TEXTS)
def test_byte_fallback_is_exact_but_for_bytes_that_are_no_text(
    byte_fallback_tokenizer: TextTokenizer, raw_ids: list[int], prompt: str
) -> None:
    ids = [raw_id % byte_fallback_tokenizer.vocab_size for raw_id in raw_ids]
    prompt_ids = byte_fallback_tokenizer.encode(prompt)
    # A bad byte behind the prompt's last character would take back the prompt, too.
    assume(byte_fallback_tokenizer.decode([*prompt_ids, *ids]).startswith(byte_fallback_tokenizer.decode(prompt_ids)))
    text = "".join(streamed(byte_fallback_tokenizer, ids, prompt_ids))
    expected = decoded(byte_fallback_tokenizer, ids, prompt_ids)
    # A bad byte turns its whole run into U+FFFD, also the characters of it that are out already.
    if REPLACEMENT not in expected:
        assert text == expected
    assert is_outline(expected.split(REPLACEMENT), text)


def is_outline(parts: Sequence[str], text: str) -> bool:
    """Whether the parts stand in the text one after the other."""
    position = 0
    for part in parts:
        found = text.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True


def test_whole_characters_leave_at_once(byte_level_tokenizer: TextTokenizer) -> None:
    by_byte = single_byte_ids(byte_level_tokenizer)
    detokenizer = Detokenizer(byte_level_tokenizer)
    pieces = [detokenizer.push(by_byte[byte]) for byte in "aé😀b".encode()]
    assert pieces == ["a", "", "é", "", "", "", "😀", "b"]
    assert detokenizer.flush() == ""


def test_byte_fallback_characters_leave_at_once(byte_fallback_tokenizer: TextTokenizer) -> None:
    text = "กขคงจฉชซ" * 12
    ids = byte_fallback_tokenizer.encode(text, add_special_tokens=False)[1:]
    assert len(ids) == len(text.encode()), "every byte is a token of its own here"
    pieces = streamed(byte_fallback_tokenizer, ids)
    assert pieces == [character for letter in text for character in ("", "", letter)] + [""]


@pytest.mark.parametrize("num_prompt_bytes", range(13))
def test_a_prompt_may_end_anywhere_in_a_byte_fallback_run(
    byte_fallback_tokenizer: TextTokenizer, num_prompt_bytes: int
) -> None:
    text = "กข🎉คกข🎉ค"
    ids = byte_fallback_tokenizer.encode(text, add_special_tokens=False)
    num_prompt_tokens = len(ids) - len(text.encode()) + num_prompt_bytes
    expected = text[len(text.encode()[:num_prompt_bytes].decode(errors="ignore")) :]
    assert "".join(streamed(byte_fallback_tokenizer, ids[num_prompt_tokens:], ids[:num_prompt_tokens])) == expected


def test_an_incomplete_end_is_flushed_once(byte_level_tokenizer: TextTokenizer) -> None:
    by_byte = single_byte_ids(byte_level_tokenizer)
    detokenizer = Detokenizer(byte_level_tokenizer)
    assert [detokenizer.push(by_byte[byte]) for byte in "a😀".encode()[:-1]] == ["a", "", "", ""]
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("num_prompt_bytes", [1, 2, 3])
@pytest.mark.parametrize("answer, expected", [("completed", "😀!"), ("broken", "!")])
def test_a_character_that_the_prompt_began(
    byte_level_tokenizer: TextTokenizer, num_prompt_bytes: int, answer: str, expected: str
) -> None:
    by_byte = single_byte_ids(byte_level_tokenizer)
    character = [by_byte[byte] for byte in "😀".encode()]
    prompt_ids = [by_byte[ord("a")], *character[:num_prompt_bytes]]
    ids = [*(character[num_prompt_bytes:] if answer == "completed" else []), by_byte[ord("!")]]
    assert "".join(streamed(byte_level_tokenizer, ids, prompt_ids)) == expected


def test_the_first_space_belongs_to_the_answer_behind_a_prompt(byte_fallback_tokenizer: TextTokenizer) -> None:
    ids = byte_fallback_tokenizer.encode("the dog", add_special_tokens=False)
    prompt_ids = byte_fallback_tokenizer.encode("What")
    special_ids = sorted(byte_fallback_tokenizer.special_token_ids)
    assert "".join(streamed(byte_fallback_tokenizer, ids)) == "the dog"
    assert "".join(streamed(byte_fallback_tokenizer, ids, special_ids * 5)) == "the dog"
    assert "".join(streamed(byte_fallback_tokenizer, ids, prompt_ids)) == " the dog"
    assert "".join(streamed(byte_fallback_tokenizer, ids, [*prompt_ids, *special_ids * 5])) == " the dog"


class CountingTokenizer(TextTokenizer):
    """Counts the tokens that are decoded."""

    num_decoded_tokens = 0
    most_decoded_at_once = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded_tokens += len(token_ids)
        self.most_decoded_at_once = max(self.most_decoded_at_once, len(token_ids))
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("answer", ["words", "bad bytes", "half characters"])
def test_cost_per_token_does_not_grow(byte_level_tokenizer: TextTokenizer, answer: str) -> None:
    tokenizer = CountingTokenizer(byte_level_tokenizer.hf_tokenizer)
    by_byte = single_byte_ids(tokenizer)
    cycle = {
        "words": tokenizer.encode("The quick brown fox 你好 😀", add_special_tokens=False),
        "bad bytes": [by_byte[0xFF]],
        "half characters": [by_byte[0xE4], by_byte[0xBD]],
    }[answer]
    ids = (cycle * 4000)[:4000]
    assert "".join(streamed(tokenizer, ids)) == byte_level_tokenizer.decode(ids)
    assert tokenizer.most_decoded_at_once <= 32
    assert tokenizer.num_decoded_tokens <= 40 * len(ids)
