"""Separates text, reasoning and calls of tools while an answer arrives. Pure.

The result does not depend on how the answer is cut into chunks: `push` holds back text whose kind is not certain. A
call is certain when its name, which must be a tool's, and the beginning of its arguments have come. All else is text.
"""

import json
import re
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, Final

from corolla.client.output_parsing.deltas import Delta, MessageBuilder
from corolla.client.output_parsing.formats import CallFormat, ReasoningFormat
from corolla.v1.generation_pb2 import ToolCallDelta

_HEAD_CHARS: Final = 512
_STRING: Final = r'"[^"\\]{0,64}"'
_HEAD: Final = re.compile(
    rf'\{{\s{{0,9}}(?:"(?:type|id)"\s{{0,9}}:\s{{0,9}}{_STRING}\s{{0,9}},\s{{0,9}}){{0,2}}'
    r'"name"\s{0,9}:\s{0,9}"([^"\\]{1,64})"\s{0,9},\s{0,9}"(?:arguments|parameters)"\s{0,9}:\s{0,9}\{'
)
"""The beginning of a call's object, up to its arguments' brace, with the usual order of keys and a limited length."""
_FIRST_KEY: Final = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS: Final = frozenset({"arguments", "id", "name", "parameters", "type"})
_OUTSIDE: Final = re.compile(r"[\s:,0-9+\-.eEtrufalsn]*")
"""The characters of JSON between brackets and strings. Numbers and words are not checked further."""
_INSIDE: Final = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_CLOSES: Final = {"{": "}", "[": "]"}


class Reading(Enum):
    """The result of a read: OPEN needs more text, CLOSED has reached the wanted depth, BROKEN is not JSON."""

    OPEN = auto()
    CLOSED = auto()
    BROKEN = auto()


class ObjectScanner:
    """Reads one object, beginning with its first brace."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        self._is_in_string = False

    def read(self, text: str, start: int, depth: int = 0) -> tuple[int, Reading]:
        """Reads until only `depth` brackets are open. Returns the position at which it stopped, and the result.

        A lone backslash at the text's end stays unread; the caller passes it again with more text.
        """
        position = start
        while position < len(text):
            if self._is_in_string:
                position = self._end_of(_INSIDE, text, position)
                if position == len(text) or text[position] == "\\":
                    return position, Reading.OPEN
                self._is_in_string = False
                position += 1
                continue
            position = self._end_of(_OUTSIDE, text, position)
            if position == len(text):
                break
            if not self._takes(text[position]):
                return position, Reading.BROKEN
            position += 1
            if len(self._closing) <= depth and not self._is_in_string:
                return position, Reading.CLOSED
        return position, Reading.OPEN

    def _end_of(self, pattern: re.Pattern[str], text: str, position: int) -> int:
        found = pattern.match(text, position)
        return position if found is None else found.end()

    def _takes(self, mark: str) -> bool:
        """Follows a bracket or a quotation mark. Returns whether it may stand here."""
        if mark in _CLOSES:
            self._closing.append(_CLOSES[mark])
        elif self._closing and mark == self._closing[-1]:
            self._closing.pop()
        elif mark == '"' and self._closing:
            self._is_in_string = True
        else:
            return False
        return True


class State(Enum):
    """The part of the answer to which the next text belongs."""

    INSIDE = auto()
    """No text has arrived, and the prompt has begun the reasoning."""
    BEGINNING = auto()
    """No text has arrived."""
    REASONING_BEGINNING = auto()
    REASONING = auto()
    BEHIND_REASONING = auto()
    ANSWER = auto()
    """The answer begins here; a call without an opening may follow."""
    TEXT = auto()
    LIST = auto()
    CALL = auto()
    """An opening or a separator came before; an object or a name should follow."""
    ARGUMENTS = auto()
    REST = auto()
    """The rest of a call's object, after its arguments."""
    BEHIND_CALL = auto()
    BETWEEN = auto()
    """A complete call came before; spaces belong to the format."""


class MarkupParser:
    """Parses one answer.

    Args:
        calls: the format of calls; None: calls are text.
        reasoning: the format of reasoning; None: reasoning is text.
        tool_names: the names that a call may have.
        call_id: returns the id for the call with this index.
        most_calls: the most calls; further ones are dropped. None: no limit.
        has_text: whether an answer may have text; without it, all that is not a call is markup.
        state: the first state: INSIDE, BEGINNING, a state of reasoning, or TEXT if the answer continues a message.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        tool_names: Collection[str] = (),
        call_id: Callable[[int], str] = str,
        *,
        most_calls: int | None = None,
        has_text: bool = True,
        state: State = State.BEGINNING,
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._tool_names = tool_names
        self._call_id = call_id
        self._most_calls = most_calls
        self._has_text = has_text
        self._state = state
        self._num_read_calls = 0
        # Invariant: `_held` is the text not returned yet. In LIST and CALL, its part before `_call_at` becomes text if
        # no call comes.
        self._held = ""
        self._call_at = 0
        self._has_ended = False
        self._builder = MessageBuilder()
        self._scanner = ObjectScanner()
        self._num_scanned = 0
        self._behind_name = None if calls is None or not calls.infix else _behind_name(calls)
        self._steps: dict[State, Callable[[], bool]] = {
            State.INSIDE: self._inside,
            State.BEGINNING: self._beginning,
            State.REASONING_BEGINNING: self._reasoning_beginning,
            State.REASONING: self._in_reasoning,
            State.BEHIND_REASONING: self._behind_reasoning,
            State.ANSWER: self._answer,
            State.TEXT: self._text,
            State.LIST: self._list,
            State.CALL: self._call,
            State.ARGUMENTS: self._arguments,
            State.REST: self._rest,
            State.BEHIND_CALL: self._behind_call,
            State.BETWEEN: self._between,
        }

    @property
    def num_calls(self) -> int:
        return self._num_read_calls if self._most_calls is None else min(self._most_calls, self._num_read_calls)

    def push(self, text: str) -> Delta:
        """Takes more text; returns the part of the answer that is certain now."""
        self._held += text
        while self._steps[self._state]():
            pass
        builder, self._builder = self._builder, MessageBuilder()
        return builder.delta

    def finish(self, *, is_cut: bool = False) -> Delta:
        """Returns the held text when the answer has ended.

        Args:
            is_cut: whether the answer ended before the model ended it. Then markup that the model had begun to write is
                dropped; in an answer that the model itself ended, it is text.
        """
        self._has_ended = True
        if is_cut:
            self._held = self._held[: self._num_before_markup()]
        return self.push("")

    # --- steps: each returns whether the next step can use the held text ------------------------------------------

    def _to(self, state: State) -> bool:
        self._state = state
        return True

    def _inside(self) -> bool:
        rest = self._held.lstrip()
        if self._calls is not None and self._may_become(rest, self._calls.opening):
            return False
        # If calls are required, a call may come at once, without reasoning.
        is_call = self._calls is not None and rest.startswith(self._calls.opening)
        return bool(rest) and self._to(State.TEXT if is_call else State.REASONING_BEGINNING)

    def _beginning(self) -> bool:
        rest = self._held.lstrip()
        if self._reasoning is None:
            return self._to(State.ANSWER)
        if self._may_become(rest, self._reasoning.opening):
            return False
        if not rest.startswith(self._reasoning.opening):
            return self._to(State.ANSWER)
        self._held = rest.removeprefix(self._reasoning.opening)
        return self._to(State.REASONING_BEGINNING)

    def _reasoning_beginning(self) -> bool:
        self._held = self._held.lstrip()
        return bool(self._held) and self._to(State.REASONING)

    def _in_reasoning(self) -> bool:
        closing = "" if self._reasoning is None else self._reasoning.closing
        before, found, behind = self._held.partition(closing)
        if found:
            self._emit(reasoning=before.rstrip())
            self._held = behind
            return self._to(State.BEHIND_REASONING)
        self._emit(reasoning=self._take(self._num_certain(closing)))
        return False

    def _behind_reasoning(self) -> bool:
        self._held = self._held.lstrip()
        return bool(self._held) and self._to(State.ANSWER)

    def _answer(self) -> bool:
        if self._calls is None or not self._calls.may_be_bare:
            return self._to(State.TEXT)
        rest = self._held.lstrip()
        if self._may_become(rest, self._calls.opening):
            return False
        if not rest.startswith("{"):
            return self._to(State.TEXT)
        return self._expect_call(len(self._held) - len(rest), State.CALL)

    def _text(self) -> bool:
        if self._calls is None:
            self._emit(self._take(len(self._held)))
            return False
        before, found, _ = self._held.partition(self._calls.opening)
        if not found:
            self._emit(self._take(self._num_certain(self._calls.opening)))
            return False
        num_spaces = len(before) - len(before.rstrip())
        self._emit(self._take(len(before) - num_spaces))
        return self._expect_call(num_spaces + len(found), State.LIST if self._calls.is_list else State.CALL)

    def _list(self) -> bool:
        rest = self._held[self._call_at :].lstrip()
        if not rest and not self._has_ended:
            return False
        if not rest.startswith("["):
            return self._no_call()
        self._call_at = len(self._held) - len(rest) + 1
        return self._to(State.CALL)

    def _call(self) -> bool:
        rest = self._held[self._call_at :].lstrip()
        if not rest and not self._has_ended:
            return False
        if self._behind_name is not None:
            return self._named_call(rest, self._behind_name)
        if not rest.startswith("{"):
            return self._no_call()
        if (head := _HEAD.match(rest[:_HEAD_CHARS])) is not None:
            return self._begin_call(head[1], rest, head.end() - 1)
        first = _FIRST_KEY.match(rest)
        if first is not None and first[1] not in _KEYS:
            return self._no_call()
        self._num_scanned, reading = self._scanner.read(rest, self._num_scanned)
        if reading is Reading.OPEN and not self._has_ended:
            return False
        call = called(rest[: self._num_scanned]) if reading is Reading.CLOSED else None
        if call is None or call[0] not in self._tool_names:
            return self._no_call()
        self._emit_call(*call)
        self._held = rest[self._num_scanned :]
        return self._to(State.BEHIND_CALL)

    def _named_call(self, rest: str, behind_name: re.Pattern[str]) -> bool:
        name, found, _ = rest.partition("[")
        if not found and not self._has_ended and any(each.startswith(name) for each in self._tool_names):
            return False
        head = behind_name.match(rest, len(name), len(name) + _HEAD_CHARS)
        if head is not None:
            return self._begin_call(name, rest, head.end() - 1)
        is_begun = name in self._tool_names and "{" not in rest and len(rest) < len(name) + _HEAD_CHARS
        return False if is_begun and not self._has_ended else self._no_call()

    def _begin_call(self, name: str, rest: str, brace_at: int) -> bool:
        if name not in self._tool_names:
            return self._no_call()
        self._emit_call(name, "")
        self._scanner = ObjectScanner()
        if self._behind_name is None:
            self._scanner.read(rest[:brace_at], 0)
        self._held = rest[brace_at:]
        return self._to(State.ARGUMENTS)

    def _arguments(self) -> bool:
        is_within_object = self._behind_name is None
        end, reading = self._scanner.read(self._held, 0, depth=int(is_within_object))
        if self._has_ended and reading is Reading.OPEN:
            end = len(self._held)
        self._emit_arguments(self._take(end))
        if reading is Reading.OPEN:
            return False
        return self._to(State.REST if reading is Reading.CLOSED and is_within_object else State.BEHIND_CALL)

    def _rest(self) -> bool:
        end, reading = self._scanner.read(self._held, 0)
        self._take(end)
        return reading is not Reading.OPEN and self._to(State.BEHIND_CALL)

    def _behind_call(self) -> bool:
        calls, rest = self._calls, self._held.lstrip()
        if calls is None or not rest:
            return False
        if calls.separator and rest.startswith(calls.separator):
            self._held = rest
            return self._expect_call(len(calls.separator), State.CALL)
        if calls.closing and self._may_become(rest, calls.closing):
            return False
        if calls.closing and rest.startswith(calls.closing):
            self._held = rest.removeprefix(calls.closing)
        return self._to(State.BETWEEN)

    def _between(self) -> bool:
        rest = self._held.lstrip()
        if not rest or self._calls is None or self._may_become(rest, self._calls.opening):
            return False
        return self._to(State.TEXT)

    def _num_before_markup(self) -> int:
        """The number of held characters that precede markup which the model had begun to write."""
        held, calls, reasoning = self._held, self._calls, self._reasoning
        if self._state in (State.ARGUMENTS, State.REST, State.REASONING_BEGINNING):
            return len(held)
        if self._state is State.REASONING:
            return self._num_before("" if reasoning is None else reasoning.closing)
        if calls is not None and not self._has_text:
            return 0
        if self._state in (State.LIST, State.CALL):
            key = _FIRST_KEY.match(held.lstrip())
            # An object without an opening, and without a key yet, may be text.
            return 0 if self._call_at > len(held) - len(held.lstrip()) or key is not None else len(held)
        marks = [calls.opening, calls.closing] if calls is not None else []
        if self._state is State.BEGINNING and reasoning is not None:
            marks.append(reasoning.opening)
        return min(map(self._num_before, marks), default=len(held))

    def _num_before(self, mark: str) -> int:
        """Counts the held characters before half a mark or more at their end; all of them if they do not end so."""
        num_begun = _num_begun(self._held, mark)
        return len(self._held) - (num_begun if 2 * num_begun >= len(mark) else 0)

    # --- what the steps have in common ------------------------------------------------------------------------------

    def _may_become(self, rest: str, mark: str) -> bool:
        """More text may complete `rest` to the mark."""
        return not self._has_ended and len(rest) < len(mark) and mark.startswith(rest)

    def _num_certain(self, mark: str) -> int:
        """The number of held characters that precede a possible beginning of the mark and the spaces before it."""
        held = self._held
        if self._has_ended:
            return len(held)
        return len(held[: len(held) - _num_begun(held, mark)].rstrip())

    def _expect_call(self, call_at: int, state: State) -> bool:
        self._call_at = call_at
        self._scanner, self._num_scanned = ObjectScanner(), 0
        return self._to(state)

    def _no_call(self) -> bool:
        self._emit(self._take(self._call_at))
        return self._to(State.TEXT)

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    def _emit(self, text: str = "", reasoning: str = "") -> None:
        self._builder.add(Delta(text, reasoning))

    def _emit_call(self, name: str, arguments: str) -> None:
        index, self._num_read_calls = self._num_read_calls, self._num_read_calls + 1
        if self.num_calls > index:
            call = ToolCallDelta(index=index, id=self._call_id(index), name=name, arguments_delta=arguments)
            self._builder.add(Delta(calls=(call,)))

    def _emit_arguments(self, text: str) -> None:
        index = self._num_read_calls - 1
        if text and self.num_calls > index:
            self._builder.add(Delta(calls=(ToolCallDelta(index=index, arguments_delta=text),)))


def _num_begun(text: str, mark: str) -> int:
    """Counts the characters at the text's end that begin the mark without completing it."""
    longest = min(len(mark) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)


def _behind_name(calls: CallFormat) -> re.Pattern[str]:
    """The pattern of the text between a call's name and its arguments' brace, in a format of names."""
    mark, infix = re.escape(calls.id_mark), re.escape(calls.infix)
    return re.compile(rf"(?:{mark}[A-Za-z0-9]{{1,64}})?{infix}\s{{0,9}}\{{")


def called(value: Any) -> tuple[str, str] | None:
    """The name and the arguments of a call, which may be the text of its complete object; None: it is not a call."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        arguments: Any = value.get("arguments", value.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (AttributeError, ValueError, RecursionError):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
