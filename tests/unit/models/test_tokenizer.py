"""Tokenizers in the files of their publishers give the ids of the publishers' libraries.

`tests/golden/tokenizers.json` has small vocabularies, and what tiktoken, mistral-common and sentencepiece answered.
"""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import sentencepiece_model_pb2_new

from corolla.chassis.errors import CheckpointError
from corolla.client.text.tokenizer import TextTokenizer
from corolla.models.tokenizer import load_tokenizer, tokenizer_of_pieces
from tests.vocabularies import GOLDEN, sentencepiece_folder, tekken_folder, tiktoken_folder


@pytest.mark.parametrize(
    "library, make", [("tiktoken", tiktoken_folder), ("tekken", tekken_folder), ("sentencepiece", sentencepiece_folder)]
)
def test_ids_are_those_of_the_publishers_library(tmp_path: Path, library: str, make: Any) -> None:
    tokenizer = TextTokenizer.load(make(tmp_path))
    asked = [each for each in GOLDEN["answers"] if library in each]
    assert len(asked) >= 40
    for each in asked:
        token_ids = tokenizer.encode(each["text"])
        assert token_ids == each[library], each["text"]
        if "<|" not in each["text"]:
            assert tokenizer.decode(token_ids) == each["text"]


def test_templates_and_special_tokens_come_from_the_other_files(tmp_path: Path) -> None:
    folder = tiktoken_folder(tmp_path, bos_token="[BOS]", eos_token={"content": "[EOS]"}, chat_template="old")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("[BOS]", "[EOS]", "{{ messages }}")
    first = len(GOLDEN["ranks"])
    assert tokenizer.decode([first + 2, 97, first + 10], skip_special_tokens=True) == "a<|tool_call_begin|>"


def test_a_template_of_a_model_that_sees_is_the_tokenizers_where_it_has_none(tmp_path: Path) -> None:
    folder = tekken_folder(tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(folder).chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("own")
    assert load_tokenizer(folder).chat_template == "own"
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"chat_template\.json cannot be read"):
        load_tokenizer(folder)


def test_a_tokenizer_json_is_read_first(tmp_path: Path) -> None:
    folder = tekken_folder(tmp_path)
    load_tokenizer(folder).save_pretrained(folder)
    (folder / "tekken.json").write_text("{}")
    assert load_tokenizer(folder).encode("the", add_special_tokens=False)


def test_what_decides_a_file_only_by_code_is_refused(tmp_path: Path) -> None:
    folder = tiktoken_folder(tmp_path, auto_map={"AutoTokenizer": ["tokenization_own.Tokenizer", None]})
    with pytest.raises(
        CheckpointError, match=r"does not say how texts are cut, .* is never run; give a tokenizer\.json"
    ):
        TextTokenizer.load(folder)


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tekken\.json is of the first kind"):
        load_tokenizer(tekken_folder(tmp_path, special_tokens=None))
    library: Any = sentencepiece_model_pb2_new
    model = library.ModelProto()
    model.ParseFromString(base64.b64decode(GOLDEN["pieces"]))
    model.trainer_spec.model_type = 1
    (tmp_path / "tekken.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=r"sentencepiece model of another kind"):
        load_tokenizer(tmp_path)


def test_a_file_of_too_many_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="too many tokens"):
        tokenizer_of_pieces({"tokens": [""] * ((1 << 20) + 1)})
