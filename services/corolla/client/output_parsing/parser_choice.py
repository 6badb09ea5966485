"""Chooses how a chat's answers are parsed: the parser, its first state, and the special tokens that it needs."""

import hashlib
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from corolla.client.output_parsing.call_rules import CallRules, calls_grammar, is_special_in_grammars
from corolla.client.output_parsing.formats import CallFormat, ReasoningFormat, call_format, reasoning_format
from corolla.client.output_parsing.parser import MarkupParser, State
from corolla.client.output_parsing.response_template import ResponseTemplateParser
from corolla.client.text.conversation import tool_values
from corolla.client.text.tokenizer import TextTokenizer

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
    def of(cls, tokenizer: TextTokenizer) -> "OutputFormat":
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
        """Whether the response template parses the answer; it does not if a grammar prescribes the format of calls."""
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
