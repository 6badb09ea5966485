"""How models write calls of tools and reasoning, and which of these a checkpoint's own way is. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A way to write calls: objects of JSON with a name and arguments, or names with arguments behind them.

    Attributes:
        opening: stands before a call, or before a list of calls.
        closing: stands behind a call, or behind a list of calls; may be empty.
        separator: between calls where no opening stands before the next one; empty: each call has its own opening.
        arguments_key: the name of the arguments; empty where a call is no object.
        infix: stands between a call's name and its arguments where a call is no object.
        id_mark: stands before an id that a model may put between the name and the infix; it counts for nothing.
        is_list: whether the calls are a list of JSON.
        may_be_bare: whether the answer may begin with a call, without the opening.
        num_id_chars: letters and digits that a call's id has to be; 0: any id will do.
    """

    opening: str
    closing: str
    separator: str
    arguments_key: str
    infix: str = ""
    id_mark: str = ""
    is_list: bool = False
    may_be_bare: bool = False
    num_id_chars: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts around what a model thinks before it answers."""

    opening: str
    closing: str


HERMES: Final = CallFormat("<tool_call>", "</tool_call>", "", "arguments")
"""As Hermes and Qwen write."""
LLAMA: Final = CallFormat("<|python_tag|>", "", ";", "parameters", may_be_bare=True)
"""As Llama 3 writes."""
MISTRAL: Final = CallFormat("[TOOL_CALLS]", "]", ",", "arguments", is_list=True, num_id_chars=9)
"""As Mistral's models wrote until version 7 of their tokenizer."""
MISTRAL_V11: Final = CallFormat("[TOOL_CALLS]", "", "", "", infix="[ARGS]", id_mark="[CALL_ID]", num_id_chars=9)
"""As they write from version 11 on: `[TOOL_CALLS]name[ARGS]{...}`."""

_CALL_SIGNS: Final = (
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_V11),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ("<|start_header_id|>ipython", LLAMA),
)
_REASONING_FORMATS: Final = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))


def call_format(template: str, tokens: Collection[str]) -> CallFormat:
    """How a model writes calls: as its chat template does, or the tokens that were added for that.

    Hermes's way where nothing tells, so that calls can be required of any model.
    """
    for sign, found in _CALL_SIGNS:
        if sign in template:
            return found
    return next((found for sign, found in _CALL_SIGNS if sign in tokens), HERMES)


def reasoning_format(template: str, tokens: Collection[str]) -> ReasoningFormat | None:
    """How a model marks its reasoning; None where it does not."""
    for each in _REASONING_FORMATS:
        if each.closing in template or (each.opening in tokens and each.closing in tokens):
            return each
    return None
