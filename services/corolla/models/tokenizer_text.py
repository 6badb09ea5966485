"""Writes a tokenizer as the text of its `tokenizer.json`, for clients that run tokenizers themselves."""

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def tokenizer_text(hf_tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A tokenizer in the form of `tokenizer.json`, with added tokens of other files, without padding and truncation.

    None: it has no such form.
    """
    if not isinstance(hf_tokenizer, PreTrainedTokenizerFast):
        return None
    backend = type(hf_tokenizer.backend_tokenizer).from_str(hf_tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())
