"""Whether two models mean the same by a token id."""

from transformers import AutoTokenizer, PretrainedConfig


def require_same_vocabulary(config: PretrainedConfig, small: PretrainedConfig) -> None:
    """Compares what two checkpoints take tokens for, before one guesses for the other.

    Their tokenizers decide, where both lie on this machine: embeddings of equal tokenizers may be padded to different
    sizes. A model that no checkpoint is known for, as one that was just made, is compared by its size only.

    Args:
        config: of the model that answers; `small` of the one that guesses.

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
