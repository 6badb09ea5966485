"""The bytes of each token, for the kinds of vocabularies that checkpoints have."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from corolla.client.text import token_bytes
from corolla.client.text.tokenizer import TextTokenizer
from tests.checkpoints import make_tiny_checkpoint

TEXTS = ["the thin man", " two  blanks", "naïve \U0001f600 \u4e2d\u6587\n\tend", "a\x00b"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_byte_level_tokens_join_to_their_text(tmp_path: Path, text: str) -> None:
    tokenizer = TextTokenizer.load(make_tiny_checkpoint("llama", tmp_path / "tiny"))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == tokenizer.decode(token_ids)


def test_the_bytes_of_sentence_pieces_join_to_their_text() -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "\u2581the": 2, "man": 3, "\u2581": 4, "<0xF0>": 5, "<0x9F>": 6, "<0x98>": 7}
    vocabulary |= {"<0x80>": 8}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>"))
    found = [tokenizer.token_bytes(each) for each in (1, 2, 4, 3, 5, 6, 7, 8)]
    assert found == [b"<s>", b" the", b" ", b"man", b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_every_byte_has_a_character() -> None:
    spelled = {token_bytes.from_byte_level(chr(each)) for each in range(0x144)} - {None}
    assert spelled == {bytes([each]) for each in range(256)}
    assert token_bytes.from_byte_level("\u4e2d") is None
