"""Chooses how a chat's answers are parsed: the parser, its first state, and the special tokens that it needs."""

import hashlib
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from corolla.client.output_parsing.call_rules import CallRules, calls_grammar, is_special_in_grammars
from corolla.client.output_parsing.deltas import Delta, MessageBuilder
from corolla.client.output_parsing.formats import CallFormat, ReasoningFormat, call_format, reasoning_format
from corolla.client.output_parsing.parser import MarkupParser, State, called
from corolla.client.text.conversation import tool_values
from corolla.client.text.tokenizer import TextTokenizer
from corolla.v1.generation_pb2 import ToolCallDelta

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
        for each in spec.fields.values():
            each.optional = True  # an answer may be cut off
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

    def push(self, text: str) -> Delta:
        """Takes more text; returns the part of the answer that is certain now."""
        return self._read(lambda: self._parser.feed(text), text)

    def finish(self, *, is_cut: bool = False) -> Delta:
        """Takes the end of the answer; returns the part that was held back, without a call that was cut off."""
        self._drops_body = is_cut
        return self._read(lambda: self._parser.finalize()[1], "")

    def _read(self, events_of: Callable[[], Sequence[Mapping[str, Any]]], text: str) -> Delta:
        if self._is_broken:
            return Delta(text)
        try:
            events = events_of()
        # The answer may not fit the template's fields, and the template's patterns may raise anything.
        except Exception:
            self._is_broken = True
            return Delta(("" if self._drops_body else self._body) + text)
        builder = MessageBuilder()
        for event in events:
            builder.add(self._delta(event))
        return builder.delta

    def _delta(self, event: Mapping[str, Any]) -> Delta:
        is_call = event["field"] == "tool_calls"
        match event["type"]:
            case "region_open":
                self._body = ""
            case "region_chunk" if is_call:
                self._body += event["text"]
            case "region_chunk" if event["field"] in _REASONING:
                return Delta(reasoning=event["text"])
            case "region_chunk" if event["field"] == "content":
                return Delta(event["text"])
            case "region_close" if is_call:
                return self._calls(event["value"])
        return Delta()

    def _calls(self, value: Any) -> Delta:
        body, self._body = self._body, ""
        given = value if isinstance(value, list) else [value]
        read = [called(each.get("function", each) if isinstance(each, dict) else None) for each in given]
        calls = [call for call in read if call is not None and call[0] in self._tool_names]
        if len(calls) < len(given):
            return Delta("" if self._drops_body else body)
        builder = MessageBuilder()
        for name, arguments in calls:
            index, self._num_read_calls = self._num_read_calls, self._num_read_calls + 1
            if self.num_calls > index:
                call = ToolCallDelta(index=index, id=self._call_id(index), name=name, arguments_delta=arguments)
                builder.add(Delta(calls=(call,)))
        return builder.delta


_NUM_TAIL_TOKENS: Final = 16
_NUM_PREFIX_TOKENS: Final = 4096
_NUM_ID_CHARS: Final = 24

AnswerParser = MarkupParser | ResponseTemplateParser
"""The parser of one answer, which separates text, reasoning and calls."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The formats in which a checkpoint's model writes calls and reasoning.

    Attributes:
        special_ids: the ids of special tokens by their texts.
        grammar_ids: the ids, by text, of the tokens that a grammar must name by id; see `is_special_in_grammars`.
        response_template: the response template in the tokenizer's configuration, which transformers reads.
    """

    calls: CallFormat
    reasoning: ReasoningFormat | None
    special_ids: Mapping[str, int]
    grammar_ids: Mapping[str, int]
    response_template: Mapping[str, Any] | None = None

    @classmethod
    def from_tokenizer(cls, tokenizer: TextTokenizer) -> "OutputFormat":
        """Finds the formats in the chat template, the added tokens and the response template of a checkpoint."""
        hf_tokenizer = tokenizer.hf_tokenizer
        templates = hf_tokenizer.chat_template or ""
        source = templates if isinstance(templates, str) else "\n".join(templates.values())
        added = {str(token): token_id for token_id, token in hf_tokenizer.added_tokens_decoder.items()}
        special_ids = {text: token_id for text, token_id in added.items() if token_id in tokenizer.special_token_ids}
        return cls(
            call_format(source, added),
            reasoning_format(source, added),
            special_ids,
            {
                text: token_id
                for text, token_id in added.items()
                if is_special_in_grammars(text, is_special=text in special_ids)
            },
            getattr(hf_tokenizer, "response_template", None),
        )

    def grammar(self, rules: CallRules) -> str | None:
        """The grammar for these formats; see `calls_grammar`."""
        return calls_grammar(rules, self.calls, self.reasoning, self.grammar_ids)


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """The way to parse the answers to one request.

    Attributes:
        begun: the text of the message that the answer continues; None if it begins a new message.
    """

    format: OutputFormat
    rules: CallRules = field(default_factory=CallRules)
    begun: str | None = None

    def shown_ids(self, end_token_ids: Collection[int]) -> frozenset[int]:
        """The ids of the special tokens that must stay in an answer's text because its parser needs them."""
        special_ids = self.format.special_ids
        if self._by_response_template:
            return frozenset(special_ids.values()) - frozenset(end_token_ids)
        calls = self.format.calls
        marks = [calls.opening, calls.id_mark, calls.infix, calls.closing] if self.rules.tools else []
        if self.format.reasoning is not None:
            marks += [self.format.reasoning.opening, self.format.reasoning.closing]
        return frozenset(special_ids[mark] for mark in marks if mark in special_ids)

    def parser(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], turn_name: str = "") -> AnswerParser | None:
        """A new parser for an answer to this prompt; None if the whole answer is text.

        The ids of calls follow from `turn_name`, so a repeated turn gets the same ids. Without a name, ids are random.
        """
        names = frozenset(tool.name for tool in self.rules.tools)
        most_calls = self.rules.most_calls
        calls, reasoning = self.format.calls, self.format.reasoning
        if self.format.response_template is not None and self._by_response_template:
            prefix = tokenizer.decode(prompt_ids[-_NUM_PREFIX_TOKENS:], skip_special_tokens=False)
            tools = [tool_values(tool) for tool in self.rules.tools]
            return ResponseTemplateParser(
                self.format.response_template, prefix, tools, names, self._call_id(turn_name), most_calls=most_calls
            )
        if not names and reasoning is None:
            return None
        tail = tokenizer.decode(prompt_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False)
        return MarkupParser(
            calls if names else None,
            reasoning,
            names,
            self._call_id(turn_name),
            most_calls=most_calls,
            has_text=not self.rules.is_required,
            state=beginning(reasoning, tail, self.begun),
        )

    @property
    def _by_response_template(self) -> bool:
        """The response template parses the answer; it does not if a grammar prescribes the format of calls."""
        return self.format.response_template is not None and not self.rules.needs_grammar

    def _call_id(self, turn_name: str) -> Callable[[int], str]:
        name = turn_name or secrets.token_hex(16)
        num_chars = self.format.calls.num_id_chars

        def call_id(index: int) -> str:
            digest = hashlib.sha256(f"{name}\0{index}".encode()).hexdigest()
            return digest[:num_chars] if num_chars else f"call_{digest[:_NUM_ID_CHARS]}"

        return call_id


def beginning(reasoning: ReasoningFormat | None, prompt_tail: str, begun: str | None) -> State:
    """The first state of a parser, which depends on whether the end of the prompt has begun reasoning.

    If the answer continues a message, that message's text `begun` may have begun reasoning instead.
    """
    if reasoning is not None and begun is not None and begun.rfind(reasoning.opening) > begun.rfind(reasoning.closing):
        return State.REASONING_BEGINNING if begun.rstrip().endswith(reasoning.opening) else State.REASONING
    if reasoning is not None and re.search(re.escape(reasoning.opening) + r"\s*\Z", prompt_tail):
        return State.INSIDE
    return State.BEGINNING if begun is None else State.TEXT
