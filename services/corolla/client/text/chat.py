"""Conversations to token ids, by the checkpoint's chat template."""

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from corolla.chassis.errors import CorollaError, InvalidRequest
from corolla.client.text.template import Template
from corolla.client.text.template_process import TemplateProcess
from corolla.client.text.tokenizer import TextTokenizer

ROLES: Final = ("system", "user", "assistant")

_MARK: Final = "\U000f0002"
"""Of private use, so that no template knows it."""
_NUM_NONCE_PARTS: Final = 4
_NONCE_PART_BYTES: Final = 8
"""Of a mark that a template cuts one part at least is left."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `role` is one of `ROLES`."""

    role: str
    content: str


def check_roles(messages: Sequence[Message]) -> None:
    """Refuses a conversation that no model can answer.

    A system message may come first; then user and assistant take turns, from a user's message to a user's message.
    Only an assistant's message may be empty: a model may end its answer at once.

    Raises:
        InvalidRequest: names the first message that is out of place.
    """
    if not messages:
        raise InvalidRequest("messages", "must not be empty")
    expected = "user"
    for index, message in enumerate(messages):
        field = f"messages[{index}].role"
        if message.role not in ROLES:
            raise InvalidRequest(field, "must be system, user or assistant")
        if message.role == "system":
            if index > 0:
                raise InvalidRequest(field, "a system message can only come first")
        elif message.role != expected:
            raise InvalidRequest(field, f"must be {expected} here: user and assistant take turns, the user first")
        else:
            expected = "assistant" if expected == "user" else "user"
        if not message.content and message.role != "assistant":
            raise InvalidRequest(f"messages[{index}].content", "must not be empty")
    if messages[-1].role != "user":
        raise InvalidRequest(f"messages[{len(messages) - 1}].role", "the last message must be the user's")


class Renderer(Protocol):
    """What renders a template, as `Template` does here and `TemplateProcess` in a process of its own."""

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str | None:
        """The text; None where the template refuses the messages. Raises CorollaError, or what the template raises."""


class ChatTemplate:
    """Renders conversations by the template that the checkpoint's tokenizer carries, if it carries one.

    Only the template writes special tokens, such as those that begin and end a message. Where a message spells one, it
    becomes plain text: a user's message cannot end itself and go on as the system's.

    Args:
        renderer: makes what renders, from a template and the special tokens that it may name.
    """

    def __init__(
        self, tokenizer: TextTokenizer, renderer: Callable[[str, Mapping[str, Any]], Renderer] = Template
    ) -> None:
        self._tokenizer = tokenizer
        self._make_renderer = renderer
        self._renderer: Renderer | None = None

    @property
    def exists(self) -> bool:
        """Whether the checkpoint brings a template, so that it can chat."""
        return bool(self._tokenizer.hf_tokenizer.chat_template)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as one text; with the beginning of the assistant's answer where asked for.

        Raises:
            InvalidRequest: the checkpoint has no template, or its template refuses these messages.
            CorollaError: as `TemplateProcess.render`.
        """
        if not self.exists:
            raise InvalidRequest("messages", "this model has no chat template; send it plain text or token ids")
        try:
            text = self._its_renderer().render(
                [{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except CorollaError:
            raise
        # A template is a program of the checkpoint's, and may raise anything.
        except Exception as error:
            raise _refused() from error
        if text is None:
            raise _refused()
        return text

    def _its_renderer(self) -> Renderer:
        if self._renderer is None:
            hf_tokenizer = self._tokenizer.hf_tokenizer
            self._renderer = self._make_renderer(hf_tokenizer.get_chat_template(), hf_tokenizer.special_tokens_map)
        return self._renderer

    def close(self) -> None:
        """Ends the process that renders, if there is one, and waits for that."""
        if isinstance(self._renderer, TemplateProcess):
            self._renderer.close()

    def prompt_ids(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> list[int]:
        """The ids of a conversation up to where the assistant's answer begins. The template writes its own BOS.

        Raises:
            InvalidRequest: as `render`.
            ContextLengthExceeded: there are far more than `max_tokens`.
        """
        rendering = self.render(messages, add_generation_prompt=True)
        self._tokenizer.check_text(rendering, max_tokens)
        token_ids = self._with_plain_messages(messages)
        return self._tokenizer.encode(rendering, add_special_tokens=False) if token_ids is None else token_ids

    def next_turn_ids(
        self,
        log_ids: Sequence[int],
        earlier: Sequence[Message],
        new: Sequence[Message],
        *,
        max_tokens: int | None = None,
    ) -> tuple[int, list[int]]:
        """The token log of a session's next turn, so that as little as possible is processed again.

        Args:
            log_ids: all prompts and answers so far, the last answer's end included.
            earlier: all messages so far, the assistant's answers as they were returned.
            new: the messages of this turn.

        Returns:
            `(num_kept_tokens, token_ids)`: the new log, and how many of its first tokens are those of `log_ids`. Its
            text is the rendering of the whole conversation, however the last answer ended.

        Raises:
            InvalidRequest, ContextLengthExceeded: as `prompt_ids`, of the whole conversation.
        """
        conversation = [*earlier, *new]
        rendering = self.render(conversation, add_generation_prompt=True)
        self._tokenizer.check_text(rendering, max_tokens)
        if (plain_ids := self._with_plain_messages(conversation)) is not None:
            return _num_equal(log_ids, plain_ids), plain_ids
        num_kept_tokens = self._num_tokens_within(log_ids, rendering)
        kept_text = self._spelled(log_ids[:num_kept_tokens])
        rest_ids = self._tokenizer.encode(rendering[len(kept_text) :], add_special_tokens=False)
        token_ids = [*log_ids[:num_kept_tokens], *rest_ids]
        if self._spelled(token_ids) == rendering:
            return num_kept_tokens, token_ids
        # This tokenizer does not spell texts as they were given, or not in parts: only equal ids are sure then.
        token_ids = self._tokenizer.encode(rendering, add_special_tokens=False)
        return _num_equal(log_ids, token_ids), token_ids

    def _with_plain_messages(self, messages: Sequence[Message]) -> list[int] | None:
        """The ids of a conversation of which a message spells special tokens; None where none does.

        The template is given a mark in place of what lies from the first such token of a message to its last one.
        """
        nonce = secrets.token_hex(_NUM_NONCE_PARTS * _NONCE_PART_BYTES)
        marked: list[Message] = []
        plain_texts: list[str] = []
        for message in messages:
            if (found := self._tokenizer.special_range(message.content)) is not None:
                start, end = found
                mark = f"{_MARK}{nonce}{len(plain_texts)}{_MARK}"
                plain_texts.append(message.content[start:end])
                message = replace(message, content=message.content[:start] + mark + message.content[end:])
            marked.append(message)
        if not plain_texts:
            return None
        parts = re.split(f"{_MARK}{nonce}([0-9]+){_MARK}", self.render(marked, add_generation_prompt=True))
        size = 2 * _NONCE_PART_BYTES
        nonce_parts = [nonce[start : start + size] for start in range(0, len(nonce), size)]
        if any(nonce_part in part for part in parts for nonce_part in nonce_parts):
            raise InvalidRequest("messages", "spell special tokens where the model's chat template cuts messages")
        token_ids = self._tokenizer.encode(parts[0], add_special_tokens=False)
        for index, part in enumerate(parts[1:], start=1):
            is_plain = index % 2 == 1
            token_ids += self._tokenizer.encode_between(plain_texts[int(part)] if is_plain else part, is_plain=is_plain)
        return token_ids

    def _num_tokens_within(self, log_ids: Sequence[int], rendering: str) -> int:
        """How many of the log's first tokens spell a beginning of the rendering."""
        num_equal_chars = _num_equal(self._spelled(log_ids), rendering)
        counts = range(len(log_ids) + 1)
        num_tokens = bisect_right(counts, num_equal_chars, key=lambda count: len(self._spelled(log_ids[:count]))) - 1
        while num_tokens > 0 and not rendering.startswith(self._spelled(log_ids[:num_tokens])):
            num_tokens -= 1
        return num_tokens

    def _spelled(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _refused() -> InvalidRequest:
    return InvalidRequest("messages", "the model's chat template does not accept this conversation")


def _num_equal(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the longest common beginning."""
    differing = (index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differing, min(len(left), len(right)))
