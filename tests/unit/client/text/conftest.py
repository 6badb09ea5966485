"""Small tokenizers of the kinds that checkpoints bring, trained here on a few lines."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from corolla.client.text.tokenizer import TextTokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "What is the capital of France? The capital of France is Paris.",
    "user system assistant You are a helpful assistant named Corolla.",
    "Ünïcödé wörds, naïve café, 你好世界, こんにちは, 한국어, emoji 😀😃👩‍👩‍👧 and 🎉.",
    "    def f(x):\n        return x + 1\n\n\tend\r\n",
]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level() -> Any:
    """A tokenizer like those of GPT-2, Llama 3 and Qwen: every id is a run of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    return tokenizer


def byte_fallback() -> Any:
    """A tokenizer like those of Llama 2, Mistral and Gemma: spaces become "▁", unknown characters bytes."""
    pieces = Tokenizer(models.BPE())
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.train_from_iterator(LINES[:3], trainers.BpeTrainer(vocab_size=150))
    model = json.loads(pieces.to_str())["model"]
    texts = ["<unk>", *SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(texts)},
            merges=[(left, right) for left, right in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIAL_TOKENS])
    tokenizer.normalizer = pieces.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_piece() -> Any:
    """A tokenizer like that of BERT: the decoder puts the spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL_TOKENS])
    )
    return tokenizer


def wrapped(tokenizer: Any, chat_template: str | None = CHAT_TEMPLATE) -> TextTokenizer:
    # Every tokenizer has a special token and one that is added and not special, as checkpoints do.
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    hf_tokenizer.chat_template = chat_template
    return TextTokenizer(hf_tokenizer)


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> TextTokenizer:
    return wrapped(byte_level())


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> TextTokenizer:
    return wrapped(byte_fallback())


@pytest.fixture(scope="session")
def word_piece_tokenizer() -> TextTokenizer:
    return wrapped(word_piece())


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback", "word_piece"])
def any_tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    tokenizer = request.getfixturevalue(f"{request.param}_tokenizer")
    assert isinstance(tokenizer, TextTokenizer)
    return tokenizer
