"""Text to token ids and back, by the checkpoint's own tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corolla.chassis.errors import CheckpointError, ContextLengthExceeded, InvalidRequest

# Most texts have fewer characters to a token, so that one look at the beginning of a long one is enough.
_FIRST_CHARS_PER_TOKEN: Final = 6
_MAX_TOKENS_AT_CUT: Final = 128


class TextTokenizer:
    """The tokenizer of one checkpoint. Read-only: all requests and threads may share it."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase) -> None:
        self.hf_tokenizer = hf_tokenizer
        self._decode = _decoder(hf_tokenizer)
        added_tokens = hf_tokenizer.added_tokens_decoder.items()
        self.special_token_ids = frozenset(
            {*hf_tokenizer.all_special_ids, *(token_id for token_id, token in added_tokens if token.special)}
        )
        """Ids that `decode` leaves out when it skips special tokens."""

    @classmethod
    def load(cls, folder: Path) -> "TextTokenizer":
        """Reads the tokenizer files of a checkpoint folder; no network, no code of the checkpoint's.

        Raises:
            CheckpointError: the folder holds no tokenizer that `transformers` can read.
        """
        if not folder.is_dir():
            raise CheckpointError(f"There is no checkpoint folder {folder}.")
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # A broken file surfaces as whatever its parser raises, plain Exception from the Rust tokenizers included.
        except Exception as error:
            raise CheckpointError(
                f"The tokenizer in {folder} cannot be read: put the checkpoint's tokenizer.json and"
                " tokenizer_config.json there, whole and unchanged."
            ) from error
        return cls(hf_tokenizer)

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included; the model's embedding may be larger."""
        return len(self.hf_tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """The text's token ids; with the tokenizer's own frame (such as a first BOS token) unless asked otherwise.

        Args:
            max_tokens: at least 1; a text of far more is refused before all of it is looked at, which may take seconds.

        Raises:
            InvalidRequest: the text holds a lone surrogate, which is no character.
            ContextLengthExceeded: there are far more than `max_tokens`; a few more are the caller's to refuse.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("text", "must be valid Unicode") from error
        if max_tokens is not None:
            self._refuse_long(text, max_tokens)
        return self._encode(text, add_special_tokens=add_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def _refuse_long(self, text: str, max_tokens: int) -> None:
        """A beginning has the same tokens by itself and in the whole text, but for some at the cut."""
        num_chars = _FIRST_CHARS_PER_TOKEN * max_tokens
        while num_chars < len(text):
            if len(self._encode(text[:num_chars], add_special_tokens=False)) > max_tokens + _MAX_TOKENS_AT_CUT:
                raise ContextLengthExceeded("prompt", f"exceeds the model's context of {max_tokens} tokens")
            num_chars *= 2

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids exactly as the tokenizer spells it; bytes that are no UTF-8 become U+FFFD."""
        return self._decode(list(token_ids), skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token by itself, special tokens spelled out; U+FFFD for what is part of a character only."""
        return self.decode([token_id], skip_special_tokens=False)


def _decoder(hf_tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int], bool], str]:
    """Decodes ids, without special tokens where the second argument says so.

    Each token of each answer comes here. Around the Rust tokenizer most of the time would go to telling arrays, tensors
    and batches from lists, so it is called itself where the checkpoint's class adds nothing to it.
    """
    classes = type(hf_tokenizer).__mro__
    if PreTrainedTokenizerFast in classes:
        own = classes[: classes.index(PreTrainedTokenizerFast)]
        if not any({"decode", "_decode"} & vars(each).keys() for each in own):
            decode: Callable[[list[int], bool], str] = hf_tokenizer.backend_tokenizer.decode
            return decode

    def decode_by_class(token_ids: list[int], skip_special_tokens: bool) -> str:
        return str(
            hf_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    return decode_by_class
