"""Converts text to token ids and back with the checkpoint's own tokenizer.

Its patterns are tried on texts for which bad ones take very long, before any caller's text comes. A regular expression
such as `(a+)+b` tries each way to divide a text among its repetitions, before it says that there is no match. Such
patterns fail on a short text of the right character, repeated; those of real tokenizers take some milliseconds. A
process of its own tries them, since a running match cannot be ended.
"""

import functools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corolla.chassis.errors import CheckpointError, InvalidRequest, context_exceeded
from corolla.client.reply_sizes import TokenWidths
from corolla.client.text import token_bytes
from corolla.client.text.worker_process import WorkerProcess, WorkLimitExceeded
from corolla.models.tokenizer import load_tokenizer

_PARTS: Final = ("a", "A", "aA", "1", "a1", " ", "a ", "\n", " \n", "\t", "!", "! ", "'", "é", "中", "\u0301", "\u00a0")
_LENGTHS: Final = (64, 1000)
_ENDS: Final = ("", "\x01", "x")
_MOST_LITERALS: Final = 64
_SYNTAX: Final = frozenset("\\()[]{}|?*+^$.&pPsSdDwWbBnrtLNM")


def try_patterns(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises CheckpointError for a tokenizer whose normalizer or pre-tokenizer takes too long to split short texts."""
    backend = hf_tokenizer.backend_tokenizer
    parts = [
        part.__getstate__().decode() if part is not None else "null"
        for part in (backend.normalizer, backend.pre_tokenizer)
    ]
    if problem := _problem(*parts):
        raise CheckpointError(
            f"A pattern in the checkpoint's tokenizer.json takes too long on texts such as {problem!r}; it could stop "
            "the service. Take the tokenizer of the model's publisher."
        )


@functools.lru_cache(maxsize=16)
def _problem(normalizer: str, pre_tokenizer: str) -> str | None:
    """The beginning of a text that cannot be split in a second; None if there is no such text."""
    parts = json.loads(normalizer), json.loads(pre_tokenizer)
    patterns = [*_patterns(parts)]
    if not patterns:
        return None
    literals = sorted({char for pattern in patterns for char in pattern if char not in _SYNTAX and char.isprintable()})
    worker = WorkerProcess("corolla.client.text.pattern_worker", parts, "tries the tokenizer's patterns")
    try:
        for part in (*_PARTS, *(each for each in literals[:_MOST_LITERALS] if each not in _PARTS)):
            texts = [(part * length)[:length] + end for length in _LENGTHS for end in _ENDS]
            try:
                can_split = worker.ask(texts)
            except WorkLimitExceeded:
                can_split = False
            if not can_split:
                return texts[0][:8]
    finally:
        worker.close()
    return None


def _patterns(part: Any) -> Iterator[str]:
    """Yields the regular expressions of a part of a tokenizer."""
    if isinstance(part, dict):
        if isinstance(pattern := part.get("Regex"), str):
            yield pattern
        part = list(part.values())
    if isinstance(part, list | tuple):
        for each in part:
            yield from _patterns(each)


# Most texts have fewer characters per token, so checking the beginning of a long text once is enough.
_FIRST_CHARS_PER_TOKEN: Final = 6
_MAX_TOKENS_AT_CUT: Final = 128
_BEGINNING_CHARS: Final = 2
_FEW_TOKENS: Final = 256


class TextTokenizer:
    """The tokenizer of one checkpoint. Read-only: all requests and threads may share it."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase) -> None:
        self.hf_tokenizer = hf_tokenizer
        self._decode, self._decode_many = _decoders(hf_tokenizer)
        added_tokens = hf_tokenizer.added_tokens_decoder.items()
        self.special_token_ids = frozenset(
            {*hf_tokenizer.all_special_ids, *(token_id for token_id, token in added_tokens if token.special)}
        )
        """Ids that `decode` leaves out when it skips special tokens."""
        special_texts = {*hf_tokenizer.all_special_tokens, *(str(token) for _, token in added_tokens if token.special)}
        self._special_beginnings = {text[:_BEGINNING_CHARS] for text in special_texts if text}
        if any(token.special and token.normalized for _, token in added_tokens):
            self._special_beginnings = {""}  # texts may spell such a token in several ways
        self._plain: Any = None
        self._added_texts = {token_id: str(token) for token_id, token in added_tokens}
        decoder = None
        if isinstance(hf_tokenizer, PreTrainedTokenizerFast):
            decoder = json.loads(hf_tokenizer.backend_tokenizer.to_str())["decoder"]
        self._is_byte_level = token_bytes.decodes_by(decoder, "ByteLevel")
        self._spells_spaces = any(token_bytes.decodes_by(decoder, kind) for kind in ("ByteFallback", "Metaspace"))

    @classmethod
    def load(cls, folder: Path) -> "TextTokenizer":
        """Reads the tokenizer files of a checkpoint folder, without the network and without the checkpoint's own code.

        Raises:
            CheckpointError: the folder holds no tokenizer that `transformers` can read, or one whose patterns take too
                long.
        """
        if not folder.is_dir():
            raise CheckpointError(f"There is no checkpoint folder {folder}.")
        try:
            hf_tokenizer = load_tokenizer(folder)
        except CheckpointError:
            raise
        # A parser may raise anything for a broken file; the Rust tokenizers raise a plain Exception.
        except Exception as error:
            raise CheckpointError(
                f"The tokenizer in {folder} cannot be read: put the checkpoint's tokenizer.json and"
                " tokenizer_config.json there, whole and unchanged."
            ) from error
        if isinstance(hf_tokenizer, PreTrainedTokenizerFast):
            try_patterns(hf_tokenizer)
        return cls(hf_tokenizer)

    @property
    def vocab_size(self) -> int:
        """The number of ids, including added tokens; the model's embedding may be larger."""
        return len(self.hf_tokenizer)

    def unnamed_end(self, end_token_ids: Collection[int]) -> str | None:
        """Returns the tokenizer's own end token if the generation config, which ends answers, does not name it."""
        token_id = self.hf_tokenizer.eos_token_id
        return None if token_id is None or token_id in end_token_ids else str(self.hf_tokenizer.eos_token)

    @property
    def first_ids(self) -> list[int]:
        """An empty prompt consists of these tokens: BOS, or the token that ends an earlier text."""
        ids = (self.hf_tokenizer.bos_token_id, self.hf_tokenizer.eos_token_id)
        return [token_id for token_id in ids if token_id is not None][:1]

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """The text's token ids, by default with the tokens that the tokenizer adds itself, such as a first BOS token.

        Args:
            max_tokens: at least 1. A text of far more tokens is refused before it is encoded to its end, since that may
                take seconds.

        Raises:
            InvalidRequest: the text has a lone surrogate, which is not a character.
            ContextLengthExceeded: there are far more tokens than `max_tokens`. The caller checks the exact number.
        """
        self.check_text(text, max_tokens)
        return self._encode(text, add_special_tokens=add_special_tokens)

    def encode_between(self, text: str, *, is_plain: bool) -> list[int]:
        """The ids of a text that follows another one.

        Args:
            is_plain: whether text that spells a special token stays plain text.
        """
        encode = self._encode_plain if is_plain else partial(self._encode, add_special_tokens=False)
        # Some tokenizers put a space before a text's first word, but not after a line break.
        line_break, token_ids = encode("\n"), encode("\n" + text)
        if token_ids[: len(line_break)] == line_break:
            return token_ids[len(line_break) :]
        return encode(text)

    def special_range(self, text: str) -> tuple[int, int] | None:
        """The start of the first and the end of the last special token that a text spells, or None."""
        # Few texts have even the beginning of a special token.
        if not any(beginning in text for beginning in self._special_beginnings):
            return None
        if not isinstance(self.hf_tokenizer, PreTrainedTokenizerFast):
            return 0, len(text)
        encoding = _encoded(self.hf_tokenizer.backend_tokenizer, text)
        # The token for unknown characters does not count: no text spells it.
        spelled_ids = self.special_token_ids - {self.hf_tokenizer.unk_token_id}
        found = [index for index, token_id in enumerate(encoding.ids) if token_id in spelled_ids]
        # The offsets of all tokens together would be a long list.
        return (encoding.token_to_chars(found[0])[0], encoding.token_to_chars(found[-1])[1]) if found else None

    def check_text(self, text: str, max_tokens: int | None = None) -> None:
        """Checks a text before it is encoded. Raises the errors of `encode`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("text", "must be valid Unicode") from error
        if max_tokens is not None:
            self._refuse_long(text, max_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def _encode_plain(self, text: str) -> list[int]:
        if not isinstance(self.hf_tokenizer, PreTrainedTokenizerFast):
            return list(
                self.hf_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
            )
        if self._plain is None:
            # Threads share the tokenizer, so `encode_special_tokens` is set on a copy, which encodes plain texts.
            backend = self.hf_tokenizer.backend_tokenizer
            plain = type(backend).from_str(backend.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        return list(_encoded(self._plain, text).ids)

    def _refuse_long(self, text: str, max_tokens: int) -> None:
        """Refuses a long text by its beginning, whose tokens are those of the whole text except for some at the cut."""
        num_chars = _FIRST_CHARS_PER_TOKEN * max_tokens
        while num_chars < len(text):
            if len(self._encode(text[:num_chars], add_special_tokens=False)) > max_tokens + _MAX_TOKENS_AT_CUT:
                raise context_exceeded(max_tokens, None)
            num_chars *= 2

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, exactly as the tokenizer decodes it; bytes that are not UTF-8 become U+FFFD."""
        if self._decode_many is not None and len(token_ids) > _FEW_TOKENS:
            return str(self._decode_many([list(token_ids)], skip_special_tokens)[0])
        return self._decode(list(token_ids), skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token, special or not; U+FFFD if the token is only a part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    def facts(self) -> dict[str, Any]:
        """The class, the special tokens and the chat template, by the names of transformers' tokenizer files."""
        tokenizer, template = self.hf_tokenizer, self.hf_tokenizer.chat_template
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return {
            "tokenizer_class": type(tokenizer).__name__,
            **{name: getattr(tokenizer, name) for name in names},
            "chat_template": template if isinstance(template, str) else None,
            "vocab_size": self.vocab_size,
        }

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token, special or not, adds to a text; they may be a part of a character."""
        if (text := self._added_texts.get(token_id)) is not None:
            return text.encode()
        if self._is_byte_level or self._spells_spaces:
            token = self.hf_tokenizer.convert_ids_to_tokens(token_id)
            if isinstance(token, str):
                found = token_bytes.from_byte_level(token) if self._is_byte_level else None
                return token_bytes.from_sentence_piece(token) if found is None else found
        return self.token_text(token_id).encode()

    def widths(self) -> TokenWidths:
        """How many bytes the tokens take in replies."""
        return TokenWidths.from_tokens(map(self.token_bytes, range(self.vocab_size)))


def _encoded(backend: Any, text: str) -> Any:
    """A text's encoding. Other Python code runs meanwhile, which `encode` does not allow."""
    return backend.encode_batch([text], add_special_tokens=False)[0]


def _decoders(
    hf_tokenizer: PreTrainedTokenizerBase,
) -> tuple[Callable[[list[int], bool], str], Callable[[list[list[int]], bool], list[str]] | None]:
    """A function that decodes ids; its second argument says whether to skip special tokens. And a function for several
    lists of ids, if there is one: it lets other Python code run meanwhile, and takes longer for a few ids.

    The service calls the function for each token of each answer. transformers' own function would spend most of the
    time on checking for arrays, tensors and batches, so this is the Rust tokenizer's function unless the checkpoint's
    class overrides decoding.
    """
    classes = type(hf_tokenizer).__mro__
    if PreTrainedTokenizerFast in classes:
        own = classes[: classes.index(PreTrainedTokenizerFast)]
        if not any({"decode", "_decode"} & vars(each).keys() for each in own):
            return hf_tokenizer.backend_tokenizer.decode, hf_tokenizer.backend_tokenizer.decode_batch

    def decode_by_class(token_ids: list[int], skip_special_tokens: bool) -> str:
        return str(
            hf_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    return decode_by_class, None
