"""A tokenizer as text, for whoever reads tokenizers itself."""

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def tokenizer_text(hf_tokenizer: PreTrainedTokenizerBase) -> str | None:
    """As a `tokenizer.json` has it, with the added tokens of all other files; None for one that has no such form."""
    if not isinstance(hf_tokenizer, PreTrainedTokenizerFast):
        return None
    backend = type(hf_tokenizer.backend_tokenizer).from_str(hf_tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())
