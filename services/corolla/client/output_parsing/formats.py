"""The formats in which models write calls of tools and reasoning, and the choice of a checkpoint's format. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of calls: JSON objects with a name and arguments, or names that are followed by their arguments.

    Attributes:
        opening: the text before a call, or before a list of calls.
        closing: the text after a call, or after a list of calls; may be empty.
        separator: the text between calls that share one opening; empty: each call has its own opening.
        arguments_key: the key of the arguments in a call's object; empty for names with arguments.
        infix: the text between a name and its arguments; empty for objects.
        id_mark: the text before an id that a model may write between name and infix; the parser ignores this id.
        is_list: whether the calls form a JSON list.
        may_be_bare: whether the answer may begin with a call, without the opening.
        num_id_chars: the required number of letters and digits of a call's id; 0 allows any id.
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
    """The texts before and after a model's reasoning."""

    opening: str
    closing: str


HERMES: Final = CallFormat("<tool_call>", "</tool_call>", "", "arguments")
"""The format of Hermes and Qwen."""
LLAMA: Final = CallFormat("<|python_tag|>", "", ";", "parameters", may_be_bare=True)
"""The format of Llama 3."""
MISTRAL: Final = CallFormat("[TOOL_CALLS]", "]", ",", "arguments", is_list=True, num_id_chars=9)
"""The format of Mistral's models until version 7 of their tokenizer."""
MISTRAL_V11: Final = CallFormat("[TOOL_CALLS]", "", "", "", infix="[ARGS]", id_mark="[CALL_ID]", num_id_chars=9)
"""The format of Mistral's models from version 11 on: `[TOOL_CALLS]name[ARGS]{...}`."""

_CALL_SIGNS: Final = (
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_V11),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ("<|start_header_id|>ipython", LLAMA),
)
_REASONING_FORMATS: Final = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))


def call_format(template: str, tokens: Collection[str]) -> CallFormat:
    """The format in which a model writes calls, recognised from its chat template or its added tokens.

    The default is the format of Hermes, so that calls can be required of any model.
    """
    for sign, found in _CALL_SIGNS:
        if sign in template:
            return found
    return next((found for sign, found in _CALL_SIGNS if sign in tokens), HERMES)


def reasoning_format(template: str, tokens: Collection[str]) -> ReasoningFormat | None:
    """The format of a model's reasoning; None if it does not mark reasoning."""
    for each in _REASONING_FORMATS:
        if each.closing in template or (each.opening in tokens and each.closing in tokens):
            return each
    return None
