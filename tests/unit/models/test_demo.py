"""The demo model is served as its package carries it, and is the model that transformers reads from that file."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from corolla.models.cache_folder import default_cache_folder
from corolla.models.checkpoint import Checkpoint
from corolla.models.demo import demo_checkpoint
from corolla.models.edges import load_edges
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.architecture.sources import ROOT
from tests.golden import golden_answers, prompt_texts
from tests.reference import Unsplit
from tests.unpacked import unpacked_demo

# How llama.cpp cuts texts for a vocabulary of the kind `smollm`: each digit, then as GPT-2 does.
SMOLLM = (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)")


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return Checkpoint.from_pretrained("demo")


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    """What the file says of its tokenizer, as the package `gguf` reads it."""
    fields = gguf.GGUFReader(demo_checkpoint()).fields
    names = [f"tokenizer.{name}" for name in ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")]
    return {name: fields[name].contents() for name in names}


@pytest.mark.model
@pytest.mark.full
def test_a_span_of_the_file_has_the_weights_that_transformers_reads(demo: Checkpoint) -> None:
    read: dict[str, torch.Tensor] = Unsplit.demo().model.state_dict()
    with demo.open_tensors({name: name for name in demo.weight_index}) as tensors:
        differing = [name for name, tensor in tensors.items() if not torch.equal(tensor[:], read[name])]
    assert differing == []
    assert read.keys() - demo.weight_index.keys() == {"lm_head.weight"}


@pytest.mark.model
@pytest.mark.full
def test_logits_of_the_file_are_bit_for_bit_those_of_what_transformers_reads(demo: Checkpoint) -> None:
    read = Checkpoint.from_pretrained(str(unpacked_demo()))
    token_ids = golden_answers()[0].prompt_ids
    assert torch.equal(logits_of(demo, token_ids), logits_of(read, token_ids))
    assert (demo.generation_config().eos_token_id, read.generation_config().eos_token_id) == ([2, 0], [2, 0])


def logits_of(checkpoint: Checkpoint, token_ids: list[int]) -> torch.Tensor:
    positions = torch.arange(len(token_ids))
    edges = load_edges(checkpoint, dtype=torch.float32)
    hidden = edges.embed(torch.tensor(token_ids), positions)[None]
    for span in (Span(0, 13), Span(13, 30)):
        hidden = load_span(checkpoint, span, dtype=torch.float32).forward(hidden, positions[None])
    return edges.head(hidden[0])


@pytest.mark.model
@pytest.mark.full
def test_the_demo_model_knows_the_capital_of_france() -> None:
    unsplit = Unsplit.demo()
    prompt_ids = unsplit.chat_ids([("user", "What is the capital of France?")])
    answer = unsplit.generate(prompt_ids, 12)
    assert unsplit.decode(answer.token_ids) == "The capital of France is Paris."
    assert answer.token_ids[-1] == 2, "the end of the turn ends the generation"


@pytest.mark.model
def test_texts_are_cut_as_llama_cpp_does(demo: Checkpoint, metadata: dict[str, Any]) -> None:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(cut), "isolated") for cut in SMOLLM]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    theirs.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    theirs.add_special_tokens(special)
    ours: Any = AutoTokenizer.from_pretrained(demo.folder)
    for text in texts():
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids, clean_up_tokenization_spaces=False) == text
    assert ours.all_special_tokens == ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    assert {token_id for token_id, token in ours.added_tokens_decoder.items() if token.special} == {
        theirs.token_to_id(token) for token in special
    }
    assert ours.chat_template == metadata["tokenizer.chat_template"]
    assert [ours.tokenize("In 1984")] == [["In", "Ġ", "1", "9", "8", "4"]]


def texts() -> list[str]:
    """Prose, code, scripts, digits, spaces and special tokens: whole files, and what lies between their lines."""
    files = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "services").rglob("*.py"))[::10]]
    whole = [path.read_text(encoding="utf-8") for path in files]
    odd = [
        " ".join(map(str, range(0, 3000, 7))), "x²³ ½ ٣٤ ४५ Ⅷ 1e-5 0x1F", "a\t\tb \n\n  c\r\n   ", "   ", "\n\n\n",
        "<|im_start|>user\n<|im_end|><|endoftext|> <|im_start|>", "don't WE'RE i'm they'll 'tis",
        "👩‍👩‍👧 é e\u0301 ﬁ \u200d\ufeff\x00", "你好世界。これは123ですか。عربي ١٢٣ हिन्दी",
    ]  # fmt: skip
    return [*prompt_texts().values(), *whole, *odd]


@pytest.mark.model
def test_what_is_written_for_the_file_is_small_and_holds_no_weights(demo: Checkpoint) -> None:
    assert (demo.name, demo.num_blocks, demo.hidden_size) == ("SmolLM2-135M-Instruct.Q4_1", 30, 576)
    assert (demo.vocab_size, demo.context_length, demo.has_tied_edges) == (49152, 8192, True)
    assert sum(path.stat().st_size for path in demo.folder.rglob("*")) < 8_000_000
    described = json.loads((demo.folder / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in described


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"COROLLA_CACHE": "/own", "XDG_CACHE_HOME": "/shared"}, "/own"),
        ({"XDG_CACHE_HOME": "/shared"}, "/shared/corolla"),
        ({}, "/home/somebody/.cache/corolla"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("COROLLA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_cache_folder() == Path(expected)
