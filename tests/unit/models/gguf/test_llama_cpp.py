"""A GGUF file means to Corolla what it means to llama.cpp: the same tokens of a text, and the same greedy answer."""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.gguf.folder import write_tokenizer
from corolla.models.gguf.header import PLAIN_TYPES, TYPES, GgufTensor, read_header
from corolla.models.gguf.pre_tokenizers import SPLITS
from corolla.models.gguf.tensors import expanded
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.architecture.sources import ROOT
from tests.gguf_files import FAMILIES_OF_FILES, LLAMA3, add_setting, make_tiny_gguf, rewrite_gguf
from tests.llama_cpp import greedy_token_ids, numbers_of, token_ids_of

pytestmark = pytest.mark.full

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_end|>", "<\uff5cUser\uff5c>"]
TEXTS = [
    "",
    "The quickest brown fox doesn't jump; it's 12345 of 2026-11-27.",
    "  two spaces,\ttabs\t\tand\n\n\nnew lines \r\n at the end  \n",
    "na\u00efve caf\u00e9 \u4f60\u597d, \u4e16\u754c \U0001f600 \u0645\u0631\u062d\u0628\u0627",
    "\u041f\u0440\u0438\u0432\u0435\u0442 e\u0301 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u00bd \u2168 \u0663",
    "<s>begin<|im_end|>\n<\uff5cUser\uff5c>the end</s> after <think>it</think>",
    "def f(x):\n    return x**2  # I'LL we'Ve DON'T\n",
    "a 1 22 333 4444 !!! ... ?? ~~~ $%^&*()[]{}",
    "camelCase HTTPServer's \u4f60\u597dabc \u30ab\u30bf\u30ab\u30ca\u3072\u3089 \ud55c\uad6d\uc5b4 x\u0301y",
    "\u10d0\u10d1 a//b/\n/c \u00b5m \u01c5 e=mc\u00b2 \u2018q\u2019 \u3002\u3001 \u0967\u0968\u0969\u096a",
    "#include <x>\r\n\r\n\tif (a!=b) {}  \n  1,234,567.89 0x1F",
]


def corpus() -> list[str]:
    return [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("architecture.md", "models.md")]


def write_vocabulary(path: Path, architecture: str = "llama", **settings: Any) -> Path:
    """Writes a file of metadata alone."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in settings.items():
        if value is not None:
            add_setting(writer, f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def byte_level() -> Mapping[str, Any]:
    learned = Tokenizer(models.BPE())
    # Merges go over the ends of words, so that other cuts of a text give other tokens.
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learned.train_from_iterator(
        [*(line for page in corpus() for line in page.splitlines()), *TEXTS * 8],
        trainers.BpeTrainer(
            vocab_size=2500, max_token_length=7, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
        ),
    )
    described = json.loads(learned.to_str())["model"]
    tokens = [*sorted(described["vocab"], key=described["vocab"].__getitem__), "<think>", "</think>"]
    merges = [" ".join(pair) for pair in described["merges"]]
    kinds = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS) - 2) + [4, 4]
    # A token that merges would never make shows whether a piece that is a token is merged.
    return {"model": "gpt2", "tokens": [*tokens, "quickest"], "token_type": [*kinds, 1], "merges": merges,
            "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


@pytest.fixture(scope="module")
def scored() -> Mapping[str, Any]:
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    learned.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=900, show_progress=False))
    octets = [f"<0x{number:02X}>" for number in range(256)]
    pieces = sorted(learned.get_vocab(), key=learned.get_vocab().__getitem__)
    single = [piece for piece in pieces if len(piece) == 1]
    longer = [piece for piece in pieces if len(piece) > 1]
    tokens = [*SPECIALS, *octets, *longer, *single]
    kinds = [2, 3, 3, 3, 3] + [6] * 256 + [1] * (len(longer) + len(single))
    scores = [0.0] * (len(SPECIALS) + 256) + [-float(rank) for rank in range(len(longer) + len(single))]
    return {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores}


def assert_same_tokens(path: Path, folder: Path, texts: Sequence[str] = TEXTS) -> None:
    write_tokenizer(read_header(path), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer.encode(text) for text in texts] == token_ids_of(path, texts)


# The models' own tokenizers take marks as parts of words, and llama.cpp's expressions for them leave marks out.
WITH_MARKS = frozenset({"gpt-4o", "kanana2", "kimi-k2", "llama4", "minimax-m2", "talkie", "tekken"})


@pytest.mark.parametrize("cut", sorted(SPLITS))
def test_texts_are_cut_alike(tmp_path: Path, byte_level: Mapping[str, Any], cut: str) -> None:
    has_marks = [any(unicodedata.category(sign).startswith("M") for sign in text) for text in TEXTS]
    texts = [text for text, has_some in zip(TEXTS, has_marks, strict=True) if not (has_some and cut in WITH_MARKS)]
    assert_same_tokens(write_vocabulary(tmp_path / "v.gguf", **byte_level, pre=cut), tmp_path / "tokenizer", texts)


@pytest.mark.parametrize("cut", ["qwen2", "llama-bpe"])
@pytest.mark.parametrize("begins, ends", [(True, False), (False, False), (True, True), (None, None)])
def test_texts_begin_and_end_alike(
    tmp_path: Path, byte_level: Mapping[str, Any], cut: str, begins: bool | None, ends: bool | None
) -> None:
    said: dict[str, Any] = {"add_bos_token": begins, "add_eos_token": ends}
    assert_same_tokens(write_vocabulary(tmp_path / "v.gguf", **byte_level, **said, pre=cut), tmp_path / "tokenizer")


@pytest.mark.parametrize("prefix", [True, False, None])
@pytest.mark.parametrize("begins", [False, None])
def test_texts_with_scores_are_alike(
    tmp_path: Path, scored: Mapping[str, Any], prefix: bool | None, begins: bool | None
) -> None:
    said: dict[str, Any] = {"add_space_prefix": prefix, "add_bos_token": begins}
    assert_same_tokens(write_vocabulary(tmp_path / "v.gguf", **scored, **said), tmp_path / "tokenizer")


@torch.no_grad()
def greedy(path: Path, prompt_ids: list[int], num_tokens: int) -> list[int]:
    checkpoint = Checkpoint.from_pretrained(str(path))
    edges = load_edges(checkpoint, dtype=torch.float32)
    spans = [load_span(checkpoint, span, dtype=torch.float32) for span in (Span(0, 1), Span(1, checkpoint.num_blocks))]
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        positions = torch.arange(len(ids))
        hidden = edges.embed(torch.tensor(ids), positions)[None]
        for span in spans:
            hidden = span.forward(hidden, positions[None])
        ids.append(int(edges.head(hidden[0, -1:]).argmax()))
    return ids[len(prompt_ids) :]


ROPE = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
# llama.cpp has no code for biases, windows or norms in these, or only for models of some sizes.
LIMITS: Mapping[str, Mapping[str, Any]] = {
    "cohere": {"use_qk_norm": False},
    "dots1": {"num_key_value_heads": 4},
    "ernie4_5": {"use_bias": False},
    # There, the width of shared experts follows from that of dense blocks and the number of heads.
    "ernie4_5_moe": {"use_bias": False, "intermediate_size": 128},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "olmoe": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": None},
    # Keys of recurrent states are as long as values.
    **{family: {"linear_key_head_dim": 16} for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}
# It reads the blocks that predict further tokens, which tiny checkpoints lack, where a file promises some.
NO_NEXT: Mapping[str, Any] = {
    "block_count": 4, "nextn_predict_layers": None, "attention.recurrent_layers": [True, False, True, True]
}  # fmt: skip
# Parts of heads for images, which are as long as those of published models in any file.
SHORT_PARTS: Mapping[str, Any] = {**NO_NEXT, "rope.dimension_sections": [1, 1, 0, 0]}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": NO_NEXT,
    "qwen3_5_text": SHORT_PARTS,
    "qwen3_5_moe_text": SHORT_PARTS,
}
CASES: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
    *((name, LIMITS.get(name, {}), SETTINGS.get(name, {})) for name in FAMILIES_OF_FILES if name != "mistral"),
    ("llama", {"rope_parameters": LLAMA3}, {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}, {}), ("llama", {}, {"rope.scale_linear": 4.0}),
    ("llama", {}, {"rope.scaling.factor": 4.0}),
    ("llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}), ("llama", {}, {"rope.freq_base": None}),
    ("llama", {}, ROPE), ("llama", {}, {**ROPE, "rope.scaling.attn_factor": 0.5}), ("qwen2", {}, ROPE),
    ("gemma3_text", {}, {"attention.sliding_window_pattern": 2}),
    ("gemma3_text", {}, {"attention.sliding_window": None}), ("gemma3_text", {}, {"rope.freq_base_swa": 500.0}),
    ("gemma2", {}, {"attention.sliding_window_pattern": 3}),
]  # fmt: skip


@pytest.mark.parametrize("family, changes, settings", CASES)
def test_greedy_answers_are_alike(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    _, path = make_tiny_gguf(family, tmp_path, num_blocks=4, changes=changes)
    said = {f"{read_header(path).architecture}.{key}": value for key, value in settings.items()}
    path = rewrite_gguf(path, tmp_path / "said.gguf", said)
    prompt_ids = [(7 * number) % 250 + 5 for number in range(40)]
    assert greedy(path, prompt_ids, 24) == greedy_token_ids(path, prompt_ids, 24)


@pytest.mark.parametrize("number", [number for number, (name, *_) in TYPES.items() if name not in PLAIN_TYPES])
def test_numbers_of_a_type_are_alike(tmp_path: Path, number: int) -> None:
    """No program here packs numbers into some types, but any bytes stand for numbers."""
    name, block_weights, block_bytes = TYPES[number]
    raw = np.random.default_rng(number).integers(0, 256, 64 * block_bytes, dtype=np.uint8)
    (tmp_path / "raw").write_bytes(raw.tobytes())
    own = expanded(GgufTensor(tmp_path / "raw", (2, 32 * block_weights), number, 0, raw.nbytes)).flatten()
    np.testing.assert_array_equal(own.numpy(), numbers_of(tmp_path / "raw", name, len(own)))
