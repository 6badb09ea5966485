"""Decodes token ids to text while they arrive, in pieces that never split a character.

`tokenizers.decoders.DecodeStream` does not work for all output: it raises on invalid UTF-8 if a later token changes the
text of earlier ones, decodes everything since the last whole character again, and never returns pending text at the
answer's end. A model may sample any tokens, so this module has a class of its own.
"""

from collections.abc import Container, Sequence
from itertools import islice

from corolla.client.text.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"

_NUM_CONTEXT_TOKENS = 6
"""The least tokens of a shortened window: an incomplete character has some, and some more decide about spaces."""

_LONG_WINDOW_TOKENS = 24
"""A window of this size is shortened as soon as it ends with a whole character."""

_MAX_WINDOW_TOKENS = 32
"""A window of this size is always shortened: valid UTF-8 would have ended with a whole character earlier."""

_MAX_INCOMPLETE_TOKENS = 3
"""An incomplete character has at most 3 of its 4 bytes, so at most 3 tokens; with byte fallback, each is one U+FFFD."""


class Detokenizer:
    """Decodes one answer token by token, at constant cost and memory per token.

    If the answer's bytes are UTF-8, all pieces together equal its text after the prompt, decoded at once without
    special tokens. With a byte-level tokenizer they do so for any bytes. (A byte-fallback decoder discards a whole run
    of bytes for one bad byte, but this class cannot take back text that it has returned.)

    Args:
        prompt_ids: the tokens before the answer, which decide whether its first space belongs to it.
        shown_ids: special tokens that are not skipped.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt_ids: Sequence[int] = (), shown_ids: Container[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        # Invariant: the first `_num_emitted_chars` characters of the window's text were returned, or are the prompt's.
        self._window_ids, num_whole_tokens = _context(tokenizer, prompt_ids)
        prompt_text = tokenizer.decode(self._window_ids)
        self._num_emitted_chars = len(prompt_text)
        self._num_whole_prompt_chars = len(tokenizer.decode(self._window_ids[:num_whole_tokens]))
        self._open_prompt_text = prompt_text if num_whole_tokens < len(self._window_ids) else None

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain now, which may be empty."""
        if token_id in self._tokenizer.special_token_ids:
            return self.flush() + self._tokenizer.token_text(token_id) if token_id in self._shown_ids else ""
        self._window_ids.append(token_id)
        text = self._tokenizer.decode(self._window_ids)
        if self._open_prompt_text is not None:
            self._close_prompt(text, self._open_prompt_text)
        num_certain_chars = len(text.rstrip(REPLACEMENT))
        must_shorten = len(self._window_ids) >= _MAX_WINDOW_TOKENS
        if must_shorten:
            num_certain_chars = max(num_certain_chars, len(text) - _MAX_INCOMPLETE_TOKENS)
        piece = self._emit(text, num_certain_chars)
        if must_shorten or (len(self._window_ids) >= _LONG_WINDOW_TOKENS and num_certain_chars == len(text)):
            self._shorten_window(text)
        return piece

    def flush(self) -> str:
        """Returns the text that was held back; an incomplete character becomes U+FFFD."""
        text = self._tokenizer.decode(self._window_ids)
        return self._emit(text, len(text))

    def _emit(self, text: str, num_certain_chars: int) -> str:
        piece = text[self._num_emitted_chars : num_certain_chars]
        self._num_emitted_chars = max(self._num_emitted_chars, num_certain_chars)
        return piece

    def _close_prompt(self, text: str, prompt_text: str) -> None:
        """Gives the answer a character that the prompt began and the answer completes."""
        if not text.startswith(prompt_text):
            self._num_emitted_chars = self._num_whole_prompt_chars
            self._open_prompt_text = None
        elif text.rstrip(REPLACEMENT) != prompt_text.rstrip(REPLACEMENT):
            self._open_prompt_text = None

    def _shorten_window(self, text: str) -> None:
        """Drops old tokens. Pending characters are counted from the end, where both windows have the same text."""
        num_pending_chars = max(0, len(text) - self._num_emitted_chars)
        latest_start = len(self._window_ids) - _NUM_CONTEXT_TOKENS
        for start in (*range(latest_start, 0, -1), latest_start):
            shorter_text = self._tokenizer.decode(self._window_ids[start:])
            # A cut inside a character leaves a part of it in front, which spoils the rest of a byte-fallback run.
            if shorter_text and text.endswith(shorter_text) and len(shorter_text) >= num_pending_chars:
                break
        self._window_ids = self._window_ids[start:]
        self._num_emitted_chars = max(0, len(shorter_text) - num_pending_chars)
        self._open_prompt_text = None


def _context(tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> tuple[list[int], int]:
    """The prompt's last visible tokens, and how many of them form whole characters.

    They begin with a whole character if there is one: a partial character would spoil a byte-fallback run.
    """
    num_wanted_tokens = _NUM_CONTEXT_TOKENS + _MAX_INCOMPLETE_TOKENS
    visible_ids = (token_id for token_id in reversed(prompt_ids) if token_id not in tokenizer.special_token_ids)
    last_ids = list(islice(visible_ids, num_wanted_tokens))[::-1]
    latest_start = max(0, len(last_ids) - _NUM_CONTEXT_TOKENS)
    for num_incomplete_tokens in range(min(_MAX_INCOMPLETE_TOKENS, len(last_ids)) + 1):
        end = len(last_ids) - num_incomplete_tokens
        for start in range(min(latest_start, end), -1, -1):
            if REPLACEMENT not in tokenizer.decode(last_ids[start:end]):
                return last_ids[start:], end - start
    return last_ids[latest_start:], len(last_ids) - latest_start
