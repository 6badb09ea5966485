"""Which token ids a model has, and whether two models mean the same by one."""

from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig


def num_tokens_of(model: Any) -> int:
    """For how many token ids the embedding of a model of transformers has rows."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def require_token_ids(name: str, token_ids: Tensor, num_tokens: int) -> None:
    """Checks ids before the embedding looks them up.

    Args:
        name: of the caller's argument.
        token_ids: int64, any shape; only tokens that count, no padding.
        num_tokens: size of the vocabulary.

    Raises:
        ValueError: it names the first id that the vocabulary does not have.
    """
    outside = token_ids[(token_ids < 0) | (token_ids >= num_tokens)]
    if outside.numel():
        raise ValueError(
            f"`{name}` has the token id {int(outside[0])} outside the model's vocabulary of {num_tokens} tokens; "
            f"ids go from 0 to {num_tokens - 1}."
        )


def require_same_vocabulary(config: PretrainedConfig, small: PretrainedConfig) -> None:
    """Compares what two checkpoints take tokens for, before one drafts for the other.

    Their tokenizers decide, where both lie on this machine: embeddings of equal tokenizers may be padded to different
    sizes. A model that no checkpoint is known for, as one that was just made, is compared by its size only.

    Args:
        config: of the model that answers; `small` of the one that drafts.

    Raises:
        ValueError: they differ.
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
    """Token to id; None where no tokenizer can be read on this machine."""
    if not config.name_or_path:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.name_or_path, local_files_only=True, trust_remote_code=False)
    # Whatever the parsers raise, plain Exception from the Rust tokenizers included.
    except Exception:
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
