"""Parses answers by the checkpoint's response template, with the parser of transformers."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from corolla.client.output_parsing.deltas import AnswerDelta, CallDelta, MessageBuilder

_REASONING: Final = frozenset({"reasoning", "reasoning_content", "thinking"})


class ResponseTemplateParser:
    """Parses one answer like `MarkupParser`, but returns each call as a whole; an unreadable call becomes text.

    Args:
        template: the response template in the tokenizer's configuration.
        prefix: the end of the prompt's text, which includes the beginning of the assistant's message.
        tools: the tools as `tool_values` returns them; their schemas tell which arguments are numbers.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        prefix: str,
        tools: Sequence[Mapping[str, Any]],
        tool_names: Collection[str],
        call_id: Callable[[int], str],
        *,
        most_calls: int | None = None,
    ) -> None:
        spec = load_response_template(dict(template))
        for field in spec.fields.values():
            field.optional = True  # an answer may be cut off
        self._parser: Any = ResponseParser(spec, prefix, tools=[dict(tool) for tool in tools])
        self._tool_names = tool_names
        self._call_id = call_id
        self._most_calls = most_calls
        self._num_read_calls = 0
        self._drops_body = False
        self._body = ""
        self._is_broken = False

    @property
    def num_calls(self) -> int:
        return self._num_read_calls if self._most_calls is None else min(self._most_calls, self._num_read_calls)

    def push(self, text: str) -> AnswerDelta:
        """Takes more text; returns the part of the answer that is certain now."""
        return self._read(lambda: self._parser.feed(text), text)

    def finish(self, *, is_cut: bool = False) -> AnswerDelta:
        """Takes the end of the answer; returns the part that was held back, without a call that was cut off."""
        self._drops_body = is_cut
        return self._read(lambda: self._parser.finalize()[1], "")

    def _read(self, events_of: Callable[[], Sequence[Mapping[str, Any]]], text: str) -> AnswerDelta:
        if self._is_broken:
            return AnswerDelta(text)
        try:
            events = events_of()
        # The answer may not fit the template's fields, and the template's patterns may raise anything.
        except Exception:
            self._is_broken = True
            return AnswerDelta(("" if self._drops_body else self._body) + text)
        builder = MessageBuilder()
        for event in events:
            builder.add(self._delta(event))
        return builder.delta

    def _delta(self, event: Mapping[str, Any]) -> AnswerDelta:
        is_call = event["field"] == "tool_calls"
        match event["type"]:
            case "region_open":
                self._body = ""
            case "region_chunk" if is_call:
                self._body += event["text"]
            case "region_chunk" if event["field"] in _REASONING:
                return AnswerDelta(reasoning=event["text"])
            case "region_chunk" if event["field"] == "content":
                return AnswerDelta(event["text"])
            case "region_close" if is_call:
                return self._calls(event["value"])
        return AnswerDelta()

    def _calls(self, value: Any) -> AnswerDelta:
        body, self._body = self._body, ""
        read = [_call(each) for each in (value if isinstance(value, list) else [value])]
        if any(name not in self._tool_names for name, _ in read):
            return AnswerDelta("" if self._drops_body else body)
        builder = MessageBuilder()
        for name, arguments in read:
            index, self._num_read_calls = self._num_read_calls, self._num_read_calls + 1
            if self.num_calls > index:
                builder.add(AnswerDelta(calls=(CallDelta(index, self._call_id(index), name, arguments),)))
        return builder.delta


def _call(value: Any) -> tuple[str, str]:
    """The name and the JSON arguments of a call; two empty texts if the value is not a call."""
    function = value.get("function", value) if isinstance(value, dict) else {}
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "", ""
    return name, json.dumps(arguments, ensure_ascii=False)
