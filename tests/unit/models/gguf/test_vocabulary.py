"""A GGUF file's tokenizer is the one that llama.cpp makes of it; settings that are not known are refused by name."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from corolla.chassis.errors import CheckpointError
from corolla.models.gguf.folder import write_tokenizer
from corolla.models.gguf.header import GgufHeader

BYTES = sorted(ByteLevel.alphabet())
SPECIALS = ["<|begin|>", "<|end|>", "<\uff5cUser\uff5c>", "<think>"]
PIECES = ["th", "he", "the", "Ġt", "Ġthe", "them"]
MERGES = ["t h", "th e", "Ġ t", "Ġt he"]
SCORED = ["<unk>", "<s>", "</s>", "▁", "t", "h", "e", "▁t", "▁the", "he", "the", "<mark>"]


def tokenizer_of(folder: Path, **settings: Any) -> Any:
    metadata = {f"tokenizer.{key.replace('__', '.')}": value for key, value in settings.items() if value is not None}
    write_tokenizer(GgufHeader({"general.architecture": "llama", **metadata}, {}, b""), folder)
    return AutoTokenizer.from_pretrained(folder)


def byte_level(folder: Path, cut: str = "gpt-2", **settings: Any) -> Any:
    tokens = [*SPECIALS, *BYTES, *PIECES]
    kinds = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    described = {"ggml__tokens": tokens, "ggml__token_type": kinds, "ggml__merges": MERGES, "ggml__bos_token_id": 0}
    return tokenizer_of(folder, ggml__model="gpt2", ggml__pre=cut, **{**described, **settings})


def scored(folder: Path, **settings: Any) -> Any:
    scores = [0.0] * 3 + [-float(index) for index in range(3, len(SCORED))]
    described = {"ggml__tokens": SCORED, "ggml__scores": scores, "ggml__token_type": [2, 3, 3] + [1] * 8 + [3]}
    return tokenizer_of(folder, ggml__model="llama", **{**described, **settings})


@pytest.mark.parametrize(
    "cut, said, begins",
    [
        ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("tekken", None, True),
        ("llama-bpe", False, False), ("qwen2", None, False),
    ],
)  # fmt: skip
def test_a_text_begins_with_a_token_as_the_way_to_split_says(
    tmp_path: Path, cut: str, said: bool | None, begins: bool
) -> None:
    tokenizer = byte_level(tmp_path, cut, ggml__add_bos_token=said)
    assert tokenizer.encode("t") == [*([0] if begins else []), len(SPECIALS) + BYTES.index("t")]


def test_a_piece_that_is_a_token_is_not_merged_where_the_way_to_split_says_so(tmp_path: Path) -> None:
    tokens = [byte_level(tmp_path / cut, cut).tokenize("them") for cut in ("gpt-2", "llama-bpe")]
    assert tokens == [["the", "m"], ["them"]]


def test_tokens_are_matched_as_the_file_spells_them(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("<\uff5cUser\uff5c>the<think>")
    assert ids == [2, len(SPECIALS) + len(BYTES) + 2, 3]
    assert tokenizer.decode(ids) == "<\uff5cUser\uff5c>the<think>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<think>"
    assert len(tokenizer) == len(SPECIALS) + len(BYTES) + len(PIECES)


@pytest.mark.parametrize(
    "prefix, text, pieces",
    [
        (None, "the", ["▁the"]),
        (True, "the", ["▁the"]),
        (True, " the", ["▁", "▁the"]),
        (True, "the<mark>the", ["▁the", "<mark>", "▁the"]),
        (False, "the", ["the"]),
        (False, " the<mark>the", ["▁the", "<mark>", "the"]),
    ],
)
def test_spaces_in_front_of_texts_are_those_of_the_file(
    tmp_path: Path, prefix: bool | None, text: str, pieces: list[str]
) -> None:
    tokenizer = scored(tmp_path, ggml__add_space_prefix=prefix)
    assert tokenizer.tokenize(text) == pieces
    assert tokenizer.encode(text)[0] == 1, "llama.cpp begins texts with the token 1, unless a file says otherwise"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True).replace(" ", "") == "the" * text.count(
        "the"
    )


def test_all_chat_templates_of_a_file_are_there(tmp_path: Path) -> None:
    templates: dict[str, Any] = {
        "chat_template": "plain",
        "chat_template__tool_use": "tools",
        "chat_templates": ["tool_use"],
    }
    assert byte_level(tmp_path, **templates).chat_template == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"ggml__add_sep_token": True}, r"tokenizer\.ggml\.add_sep_token"),
        ({"ggml__suppress_tokens": [3]}, r"tokenizer\.ggml\.suppress_tokens"),
        ({"ggml__normalizer__lowercase": True}, r"tokenizer\.ggml\.normalizer\.lowercase"),
        ({"a_key_of_tomorrow": 1}, r"tokenizer\.a_key_of_tomorrow"),
    ],
)
def test_a_setting_that_would_change_tokens_is_named(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"has {name}, which would change tokens and is not served"):
        byte_level(tmp_path, **settings)


def test_a_special_token_that_there_is_not_is_none(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, ggml__padding_token_id=2**32 - 1, ggml__seperator_token_id=2**32 - 1)
    assert (tokenizer.pad_token, tokenizer.bos_token) == (None, SPECIALS[0])


def test_settings_without_effect_are_no_reason_to_refuse(tmp_path: Path) -> None:
    byte_level(tmp_path, ggml__add_sep_token=False, ggml__fim_pre_token_id=3, ggml__token_type_count=1)


@pytest.mark.parametrize("kind", [None, "t5", "bert"])
def test_a_type_of_tokenizer_that_is_not_served_is_named(tmp_path: Path, kind: str | None) -> None:
    with pytest.raises(CheckpointError, match=f"is of the type {kind!r}, which is not served"):
        tokenizer_of(tmp_path, ggml__model=kind)


def test_a_byte_level_tokenizer_without_merges_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no merges .*; give the model as safetensors"):
        byte_level(tmp_path, ggml__merges=[])


@pytest.mark.parametrize("cut", [None, "default", "a-way-of-tomorrow"])
def test_an_unknown_way_to_split_is_refused(tmp_path: Path, cut: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"cuts texts in a way \(.*\) that is not known here"):
        byte_level(tmp_path, cut)  # type: ignore[arg-type]
