"""Checks that a model has the given token ids, and that two models have the same vocabulary."""

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from corolla.models.tokenizer import load_tokenizer


def num_tokens_of(model: Any) -> int:
    """The number of rows of a transformers model's embedding, which is the number of its token ids."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def require_token_ids(name: str, token_ids: Tensor, num_tokens: int) -> None:
    """Checks token ids before the embedding looks them up.

    Args:
        name: the name of the caller's argument.
        token_ids: int64, any shape, on any device, without padding.
        num_tokens: the size of the vocabulary.

    Raises:
        ValueError: an id is outside the vocabulary; the message names the first one.
    """
    outside = token_ids[(token_ids < 0) | (token_ids >= num_tokens)]
    if outside.numel():
        raise ValueError(
            f"`{name}` has the token id {int(outside[0])} outside the model's vocabulary of {num_tokens} tokens; "
            f"ids go from 0 to {num_tokens - 1}."
        )


def require_same_vocabulary(config: PretrainedConfig, small: PretrainedConfig) -> None:
    """Compares the vocabularies of two models before one drafts for the other.

    If both tokenizers are on this machine, they are compared, since models with equal tokenizers may pad their
    embeddings to different sizes. Otherwise, as for a model that was just made, only the sizes are compared.

    Args:
        config: the configuration of the model that answers; `small` is that of the model that drafts.

    Raises:
        ValueError: the vocabularies differ.
    """
    vocabulary, small_vocabulary = _vocabulary_of(config), _vocabulary_of(small)
    if vocabulary is None or small_vocabulary is None:
        if config.vocab_size != small.vocab_size:
            raise ValueError(
                f"`small_model` has {small.vocab_size} tokens and the model {config.vocab_size}; it must have the same "
                "tokenizer."
            )
    elif vocabulary != small_vocabulary:
        token_id = min(token_id for _, token_id in vocabulary.items() ^ small_vocabulary.items())
        raise ValueError(
            f"`small_model` has another tokenizer than the model: they differ first in token {token_id}; it must have "
            "the same."
        )


def _vocabulary_of(config: PretrainedConfig) -> dict[str, int] | None:
    """The vocabulary, from token to id; None if no tokenizer can be read on this machine."""
    if not config.name_or_path:
        return None
    try:
        tokenizer = load_tokenizer(config.name_or_path)
    # Parsers raise many classes of exceptions; the Rust tokenizers raise plain `Exception`.
    except Exception:
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
