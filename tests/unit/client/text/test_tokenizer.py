from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from corolla.chassis.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from corolla.client.text.tokenizer import TextTokenizer, try_patterns

TEXT = " Two  spaces, café 你好 😀\n\tand <|im_end|> don't stop ."


def test_a_saved_tokenizer_loads_and_equals_transformers(byte_level_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    byte_level_tokenizer.hf_tokenizer.save_pretrained(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == len(expected)
    for add_special_tokens in (True, False):
        ids = tokenizer.encode(TEXT, add_special_tokens=add_special_tokens)
        assert ids == expected.encode(TEXT, add_special_tokens=add_special_tokens)
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert tokenizer.decode(ids) == TEXT.replace("<|im_end|>", "")
    assert tokenizer.hf_tokenizer.chat_template == byte_level_tokenizer.hf_tokenizer.chat_template


def test_special_tokens_are_those_that_decoding_skips(any_tokenizer: TextTokenizer) -> None:
    skipped = {
        token_id
        for token_id in range(any_tokenizer.vocab_size)
        if any_tokenizer.token_text(token_id) and not any_tokenizer.decode([token_id])
    }
    assert len(skipped) >= 3
    assert skipped == any_tokenizer.special_token_ids


def test_token_text_spells_special_tokens(byte_level_tokenizer: TextTokenizer) -> None:
    end = byte_level_tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert [byte_level_tokenizer.token_text(token_id) for token_id in end] == ["<|im_end|>"]


def test_an_end_token_of_the_tokenizer_that_ends_no_answer_is_found(byte_level_tokenizer: TextTokenizer) -> None:
    hf_tokenizer = byte_level_tokenizer.hf_tokenizer
    end = hf_tokenizer.eos_token_id
    assert end is not None
    assert byte_level_tokenizer.unnamed_end({end, end + 1}) is None
    assert byte_level_tokenizer.unnamed_end({end + 1}) == hf_tokenizer.eos_token


def test_a_lone_surrogate_is_refused(byte_level_tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest):
        byte_level_tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("text", ["a", "word ", "two  spaces\n", " "])
def test_far_too_long_a_text_is_refused_before_all_of_it_is_encoded(any_tokenizer: TextTokenizer, text: str) -> None:
    text *= 20_000
    num_tokens = len(any_tokenizer.encode(text))
    assert any_tokenizer.encode(text, max_tokens=max(num_tokens, 1)) == any_tokenizer.encode(text)
    if num_tokens > 1000:
        with pytest.raises(ContextLengthExceeded):
            any_tokenizer.encode(text, max_tokens=500)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        TextTokenizer.load(tmp_path / "none")


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"model": 3}'])
def test_an_unreadable_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nclass Evil: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    with pytest.raises(CheckpointError):
        TextTokenizer.load(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("place", ["normalizer", "pre_tokenizer"])
def test_a_pattern_that_takes_too_long_is_refused_before_any_text_comes(tmp_path: Path, place: str) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    slow = Regex(r"(q+)+b")
    if place == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(slow, "x")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(slow, "isolated")])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="takes too long on texts such as 'qqqqqqqq'"):
        TextTokenizer.load(tmp_path)


def test_patterns_of_well_known_tokenizers_are_quick_enough() -> None:
    """Those of GPT-2, Llama 3, o200k and of numbers in groups of three."""
    contractions = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    for pattern in (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + contractions + r"?|\s+",
        r"(?=(\d{3})+(?!\d))",
    ):
        backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        try_patterns(PreTrainedTokenizerFast(tokenizer_object=backend))
