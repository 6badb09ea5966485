"""Fields that a body has and this service does not know: which are ignored, and which are refused by name. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from pydantic import BaseModel

from corolla.chassis.errors import InvalidRequest

_MOST_NAMES: Final = 16
_MOST_PARTS: Final = 20_000
"""How many parts of a body are looked at: no other Python code runs meanwhile."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer, so it must not be ignored.

    Attributes:
        neutral: the values, apart from null, empty lists, objects and texts, that change nothing.
        instead: the field to set instead; empty: there is none.
    """

    neutral: tuple[Any, ...] = ()
    instead: str = ""

    def is_neutral(self, value: Any) -> bool:
        """Whether ignoring the field would change nothing."""
        if value is None or (isinstance(value, str | list | dict) and not value):
            return True
        # True equals 1 in Python, and must not pass for it.
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.neutral)

    @property
    def sentence(self) -> str:
        """The problem, for the caller who set the field."""
        known = f"; set {self.instead} instead" if self.instead else ""
        return f"would change the answer, and this service does not support it{known}"


OF_ANSWERS: Final[Mapping[str, Refused]] = {
    # Fields of vLLM.
    "min_tokens": Refused((0,)),
    "stop_token_ids": Refused(instead="stop"),
    "bad_words": Refused(instead="logit_bias"),
    "allowed_token_ids": Refused(instead="response_format"),
    "include_stop_str_in_output": Refused((False,)),
    "skip_special_tokens": Refused((True,)),
    "spaces_between_special_tokens": Refused((True,)),
    "truncate_prompt_tokens": Refused(),
    "length_penalty": Refused((1, 1.0)),
    "use_beam_search": Refused((False,)),
    "early_stopping": Refused((False,)),
    "chat_template": Refused(),
    "documents": Refused(),
    "guided_grammar": Refused(instead='response_format with the type "lark"'),
    "guided_whitespace_pattern": Refused(),
    "logits_processors": Refused(),
    "prompt_embeds": Refused(),
    "mm_processor_kwargs": Refused(),
    "thinking_token_budget": Refused(),
    # Fields of SGLang, llama.cpp, TGI, Ollama and others.
    "ebnf": Refused(instead='response_format with the type "lark"'),
    "grammar": Refused(instead='response_format with the type "lark"'),
    "regex": Refused(instead="response_format"),
    "json_schema": Refused(instead="response_format"),
    "structural_tag": Refused(),
    "custom_logit_processor": Refused(),
    "no_stop_trim": Refused((False,)),
    "lora_path": Refused(instead="model"),
    "adapter_id": Refused(instead="model"),
    "n_predict": Refused((-1,), instead="max_tokens"),
    "num_predict": Refused((-1,), instead="max_tokens"),
    "max_new_tokens": Refused(instead="max_tokens"),
    "repeat_penalty": Refused((1, 1.0), instead="repetition_penalty"),
    "no_repeat_ngram_size": Refused((0,)),
    "typical_p": Refused((1, 1.0)),
    "tfs_z": Refused((1, 1.0)),
    "top_a": Refused((0, 0.0)),
    "top_n_sigma": Refused((-1, -1.0, 0, 0.0)),
    "mirostat": Refused((0,)),
    "mirostat_mode": Refused((0,)),
    "dry_multiplier": Refused((0, 0.0)),
    "xtc_probability": Refused((0, 0.0)),
    "dynatemp_range": Refused((0, 0.0)),
    "epsilon_cutoff": Refused((0, 0.0)),
    "eta_cutoff": Refused((0, 0.0)),
    "smoothing_factor": Refused((0, 0.0)),
    "watermark": Refused((False,)),
    "enable_thinking": Refused(instead="chat_template_kwargs"),
    "thinking": Refused(instead="chat_template_kwargs"),
    "thinking_budget": Refused(),
    "safe_prompt": Refused((False,)),
    "images": Refused(),
    # Fields of OpenAI's that this service cannot follow.
    "functions": Refused(instead="tools"),
    "function_call": Refused(("auto", "none"), instead="tool_choice"),
    "audio": Refused(),
    "web_search_options": Refused(),
}
"""Fields of other servers, by name, that would change an answer."""


OF_CHATS: Final[Mapping[str, Refused]] = {
    **OF_ANSWERS,
    "prompt": Refused(instead="messages"),
    "max_output_tokens": Refused(instead="max_completion_tokens"),
}
OF_COMPLETIONS: Final[Mapping[str, Refused]] = {
    **OF_ANSWERS,
    "messages": Refused(),
    "tools": Refused(),
    "reasoning_effort": Refused(),
    "chat_template_kwargs": Refused(),
    "max_completion_tokens": Refused(instead="max_tokens"),
    "max_output_tokens": Refused(instead="max_tokens"),
}
OF_RESPONSES: Final[Mapping[str, Refused]] = {
    **OF_ANSWERS,
    "conversation": Refused(instead="previous_response_id"),
    "prompt": Refused(instead="input"),
    "messages": Refused(instead="input"),
    "max_tokens": Refused(instead="max_output_tokens"),
    "max_completion_tokens": Refused(instead="max_output_tokens"),
    "response_format": Refused(instead="text.format"),
    "guided_json": Refused(instead="text.format"),
    "guided_regex": Refused(),
    "guided_choice": Refused(),
    "structured_outputs": Refused(instead="text.format"),
    "reasoning_effort": Refused(instead="reasoning.effort"),
    "chat_template_kwargs": Refused(),
    "stop": Refused(),
    "n": Refused((1,)),
    "ignore_eos": Refused((False,)),
    "time_limit_ms": Refused(),
    "session_id": Refused(instead="previous_response_id"),
}
"""The same, with the fields of the other routes that would change an answer of this one."""

OF_MESSAGES: Final[Mapping[str, Refused]] = {"audio": Refused(), "images": Refused()}
OF_FORMS: Final[Mapping[str, Refused]] = {"grammar": Refused(), "structural_tag": Refused()}
"""Fields of a chat's messages, and of the form of an answer, that would change the answer."""


def ignored_fields(body: BaseModel) -> list[str]:
    """The places of what this service ignores in a body, at most 16, such as `messages[].mood`; drops the values.

    Raises InvalidRequest for a field that would change the answer.
    """
    found: set[str] = set()
    for place, part in _parts(body):
        if getattr(part, "is_skipped", False):
            found.add(place)
        unknown = part.model_extra or {}
        refused: Mapping[str, Refused] = getattr(part, "refused_fields", {})
        for name in refused.keys() & unknown.keys():
            if not refused[name].is_neutral(unknown[name]):
                raise InvalidRequest(_joined(place, name), refused[name].sentence)
        if not getattr(part, "is_skipped", False):
            found.update(_joined(place, name) for name in islice(unknown, _MOST_NAMES))
        unknown.clear()
    return sorted(found)[:_MOST_NAMES]


def _parts(body: BaseModel) -> Iterator[tuple[str, BaseModel]]:
    """Yields the parts of a body that have fields, each with its place, and first the body itself."""
    parts: list[tuple[str, BaseModel]] = [("", body)]
    for place, part in islice(_popped(parts), _MOST_PARTS):
        yield place, part
        for name in part.model_fields_set & type(part).model_fields.keys():
            value = getattr(part, name)
            if isinstance(value, BaseModel):
                parts.append((_joined(place, name), value))
            elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
                parts += [(f"{_joined(place, name)}[]", each) for each in value]


def _popped(parts: list[tuple[str, BaseModel]]) -> Iterator[tuple[str, BaseModel]]:
    while parts:
        yield parts.pop()


def _joined(place: str, name: str) -> str:
    """The place of a field, with a question mark for a name that a header cannot carry."""
    name = name if _NAME.fullmatch(name) else "?"
    return f"{place}.{name}" if place else name
