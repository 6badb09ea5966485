"""Converts conversations to token ids with the checkpoint's chat template.

While a template renders, marks stand in for texts which spell special tokens, so that these stay plain text.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from corolla.chassis.errors import CorollaError, InvalidRequest
from corolla.client.text.conversation import ChatSetting, message_values, tool_values
from corolla.client.text.template import RESERVED_NAMES, Template, TemplateRefusal
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.text.worker_process import WorkerProcess, WorkLimitExceeded
from corolla.v1.common_pb2 import ChatMessage

_MARK: Final = "\U000f0002"
"""A character of private use, to which templates give no meaning."""
_NUM_NONCE_PARTS: Final = 4
_NONCE_PART_DIGITS: Final = 20
"""The length of one part of a nonce. If a template cuts a mark, at least one part stays whole, and shows the cut.

The parts have only digits, because a template may change letters.
"""
_ESCAPES: Final = {0: 0, 1: 1, 3: 2}
"""Maps the number of backslashes before a quotation mark to how often the text was encoded as a JSON string."""


class Marks:
    """The marks of one rendering.

    Args:
        special_range: returns the start of the first and the end of the last special token in a text, or None.
    """

    def __init__(self, special_range: Callable[[str], tuple[int, int] | None]) -> None:
        self._special_range = special_range
        self._parts = [
            f"{secrets.randbelow(10**_NONCE_PART_DIGITS):0{_NONCE_PART_DIGITS}}" for _ in range(_NUM_NONCE_PARTS)
        ]
        self._nonce = "".join(self._parts)
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        """Any text has been marked."""
        return bool(self._texts)

    def marked(self, value: Any) -> Any:
        """A copy of a JSON value. In each text, a mark replaces the part from the first to the last special token."""
        match value:
            case str():
                return self._marked_text(value)
            case list() | tuple():
                return [self.marked(each) for each in value]
            case dict():
                return {self._marked_text(key): self.marked(each) for key, each in value.items()}
        return value

    def _marked_text(self, text: str) -> str:
        if (found := self._special_range(text)) is None:
            return text
        start, end = found
        # The quotation mark shows whether the template encodes the text as JSON.
        mark = f'{_MARK}{self._nonce}{len(self._texts)}"{_MARK}'
        self._texts.append(text[start:end])
        return text[:start] + mark + text[end:]

    def split(self, rendering: str) -> list[str] | None:
        """Splits a rendering of marked values: the template's text, a marked text, the template's text, and so on.

        Returns None if the template has cut or changed a mark.
        """
        parts = re.split(rf'{_MARK}{self._nonce}([0-9]+)(\\*)"{_MARK}', rendering)
        template_texts, numbers, backslashes = parts[::3], parts[1::3], parts[2::3]
        if any(nonce_part in text for text in template_texts for nonce_part in self._parts):
            return None
        texts = template_texts[:1]
        for number, slashes, following in zip(numbers, backslashes, template_texts[1:], strict=True):
            if len(slashes) not in _ESCAPES:
                return None
            plain = self._texts[int(number)]
            for _ in range(_ESCAPES[len(slashes)]):
                plain = json.dumps(plain, ensure_ascii=False)[1:-1]
            texts += [plain, following]
        return texts


class TemplateProcess:
    """Renders one template in a process of its own. Safe to use from several threads.

    Args:
        source, special_tokens: see `Template`.
        longest_wait_s: seconds to wait for earlier renderings, each of which may take a second of processor time.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any], *, longest_wait_s: float = 10.0) -> None:
        self._worker = WorkerProcess(
            "corolla.client.text.template",
            [source, dict(special_tokens)],
            "renders chat templates",
            longest_wait_s=longest_wait_s,
        )

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the first request starts it."""
        return self._worker.pid

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Renders a conversation. It takes the arguments of `Template.render`.

        Raises:
            TemplateRefusal: the template does not accept the conversation, or fails.
            InvalidRequest: the rendering takes too long, or too much memory.
            QueueFull: other callers' renderings take too long.
            InternalError: the process ends again and again.
        """
        try:
            answer = cast(dict[str, str], self._worker.ask({"messages": list(messages), **options}))
        except WorkLimitExceeded as error:
            raise InvalidRequest("messages", f"take the model's chat template {error}") from None
        if "refusal" in answer:
            raise TemplateRefusal(answer["refusal"])
        return answer["text"]

    def close(self) -> None:
        """Waits for a running rendering, then ends the process."""
        self._worker.close()


_BARE: Final = ChatSetting()

Renderer = Template | TemplateProcess
"""The object that renders one template, in this process or in a process of its own."""


class ChatTemplate:
    """Renders conversations with the chat template of the checkpoint's tokenizer, if it has one.

    Only the template writes special tokens, such as those that begin and end a message. If a message spells one, its
    spelling is encoded as plain text, so a user's message cannot end itself and continue as the system's.

    Args:
        renderer: makes a renderer from a template and the special tokens that it may name.
    """

    def __init__(
        self, tokenizer: TextTokenizer, renderer: Callable[[str, Mapping[str, Any]], Renderer] = Template
    ) -> None:
        self._tokenizer = tokenizer
        self._make_renderer = renderer
        self._renderers: dict[str, Renderer] = {}

    @property
    def reserved_names(self) -> frozenset[str]:
        """The names that the service itself passes to a template, so that a caller cannot set them."""
        return RESERVED_NAMES | self._tokenizer.hf_tokenizer.special_tokens_map.keys()

    @property
    def knows_tools(self) -> bool:
        """True if the template for conversations with tools mentions tools; any other template would leave them out."""
        source = self._tokenizer.hf_tokenizer.get_chat_template(tools=[{}]) if self.exists else ""
        return "tools" in source or "tool_calls" in source

    @property
    def exists(self) -> bool:
        """The checkpoint has a chat template."""
        return bool(self._tokenizer.hf_tokenizer.chat_template)

    def render(
        self, messages: Sequence[ChatMessage], setting: ChatSetting = _BARE, *, add_generation_prompt: bool
    ) -> str:
        """The conversation as one text, with the beginning of the assistant's answer if `add_generation_prompt`.

        Raises:
            InvalidRequest: the checkpoint has no template, or its template refuses these messages.
            CorollaError: as in `TemplateProcess.render`.
        """
        return self._rendered(_values(messages, setting), setting, add_generation_prompt=add_generation_prompt)

    def _rendered(self, values: Mapping[str, Any], setting: ChatSetting, *, add_generation_prompt: bool) -> str:
        if not self.exists:
            raise InvalidRequest("messages", "this model has no chat template; send it plain text or token ids")
        try:
            return self._renderer(values["tools"]).render(
                **values, add_generation_prompt=add_generation_prompt, continues_last=setting.continues_last
            )
        except CorollaError:
            raise
        except TemplateRefusal as refusal:
            raise _refused(refusal.sentence) from None
        # A template is a program from the checkpoint, and may raise anything.
        except Exception as error:
            raise _refused() from error

    def _renderer(self, tools: Any) -> Renderer:
        """The renderer for conversations with these tools: a checkpoint may have a separate template for tools."""
        hf_tokenizer = self._tokenizer.hf_tokenizer
        source = hf_tokenizer.get_chat_template(tools=tools)
        renderer = self._renderers.get(source)
        if renderer is None:
            made = self._make_renderer(source, hf_tokenizer.special_tokens_map)
            renderer = self._renderers.setdefault(source, made)  # several threads may come here
        return renderer

    def close(self) -> None:
        """Ends the rendering processes, if there are any, and waits for their end."""
        for renderer in list(self._renderers.values()):
            if isinstance(renderer, TemplateProcess):
                renderer.close()

    def prompt_ids(self, messages: Sequence[ChatMessage], setting: ChatSetting = _BARE) -> list[int]:
        """The ids of a conversation up to the beginning of the assistant's answer. The template writes its own BOS.

        Raises:
            InvalidRequest, CorollaError: as in `render`.
        """
        rendering, plain_ids = self._prompt(messages, setting, None)
        return self._tokenizer.encode(rendering, add_special_tokens=False) if plain_ids is None else plain_ids

    def next_turn_ids(
        self,
        log_ids: Sequence[int],
        earlier: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        setting: ChatSetting = _BARE,
        *,
        max_tokens: int | None = None,
    ) -> tuple[int, list[int]]:
        """The token log of a session's next turn, which shares as many tokens as possible with the last log.

        Args:
            log_ids: the tokens of all prompts and answers so far, including the last answer's end.
            earlier: all messages so far, with the assistant's answers as they were returned.
            new: the messages of this turn.

        Returns:
            `(num_kept_tokens, token_ids)`: how many first tokens of the new log are those of `log_ids`, always fewer
            than all of the new log; and the new log, whose text is the rendering of the whole conversation, however the
            last answer ended.

        Raises:
            InvalidRequest, CorollaError: as in `render`, for the whole conversation.
            ContextLengthExceeded: the new log would have far more than `max_tokens` tokens.
        """
        rendering, plain_ids = self._prompt([*earlier, *new], setting, max_tokens)
        num_kept_tokens, token_ids = self._continued(log_ids, rendering, plain_ids)
        # The last token of a prompt is always processed: its output gives the answer's first token.
        return min(num_kept_tokens, len(token_ids) - 1), token_ids

    def _continued(self, log_ids: Sequence[int], rendering: str, plain_ids: list[int] | None) -> tuple[int, list[int]]:
        if plain_ids is not None:
            return _num_equal(log_ids, plain_ids), plain_ids
        if not log_ids:
            return 0, self._tokenizer.encode(rendering, add_special_tokens=False)
        num_kept_tokens = self._num_tokens_within(log_ids, rendering)
        kept_text = self._spelled(log_ids[:num_kept_tokens])
        rest_ids = self._tokenizer.encode(rendering[len(kept_text) :], add_special_tokens=False)
        token_ids = [*log_ids[:num_kept_tokens], *rest_ids]
        if self._spelled(token_ids) == rendering:
            return num_kept_tokens, token_ids
        # The tokenizer does not decode to the text that was encoded, or not in parts, so only equal ids can be kept.
        token_ids = self._tokenizer.encode(rendering, add_special_tokens=False)
        return _num_equal(log_ids, token_ids), token_ids

    def _prompt(
        self, messages: Sequence[ChatMessage], setting: ChatSetting, max_tokens: int | None
    ) -> tuple[str, list[int] | None]:
        """The text up to the beginning of the answer, and its ids; None as ids if no message spells a special token.

        Tools and template arguments count like messages.
        """
        values, begins = _values(messages, setting), not setting.continues_last
        rendering = self._rendered(values, setting, add_generation_prompt=begins)
        if not rendering:
            raise InvalidRequest("messages", "must give a text with the model's chat template")
        self._tokenizer.check_text(rendering, max_tokens)
        marks = Marks(self._tokenizer.special_range)
        marked = marks.marked(values)
        if not marks:
            return rendering, None
        texts = marks.split(self._rendered(marked, setting, add_generation_prompt=begins))
        if texts is None:
            raise InvalidRequest(
                "messages", "contain the text of special tokens, and the model's chat template changes texts there"
            )
        token_ids = self._tokenizer.encode(texts[0], add_special_tokens=False)
        for index, text in enumerate(texts[1:], start=1):
            token_ids += self._tokenizer.encode_between(text, is_plain=index % 2 == 1)
        return rendering, token_ids

    def _num_tokens_within(self, log_ids: Sequence[int], rendering: str) -> int:
        """The number of the log's first tokens that spell a beginning of the rendering."""
        num_equal_chars = _num_equal(self._spelled(log_ids), rendering)
        counts = range(len(log_ids) + 1)
        num_tokens = bisect_right(counts, num_equal_chars, key=lambda count: len(self._spelled(log_ids[:count]))) - 1
        while num_tokens > 0 and not rendering.startswith(self._spelled(log_ids[:num_tokens])):
            num_tokens -= 1
        return num_tokens

    def _spelled(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _values(messages: Sequence[ChatMessage], setting: ChatSetting) -> dict[str, Any]:
    return {
        "messages": [message_values(message) for message in messages],
        "tools": [tool_values(tool) for tool in setting.tools] or None,
        "arguments": dict(setting.template_arguments),
    }


def _refused(sentence: str = "") -> InvalidRequest:
    said = f": {sentence}" if sentence else ""
    return InvalidRequest("messages", f"the model's chat template does not accept this conversation{said}")


def _num_equal(left: Sequence[object], right: Sequence[object]) -> int:
    """The length of the longest common beginning."""
    differing = (index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differing, min(len(left), len(right)))
