"""Fields that this service does not follow: which are ignored, and which are refused by name. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Final

from pydantic import BaseModel

from corolla.chassis.errors import InvalidRequest
from corolla.client.http.field_paths import joined, shown

_MOST_NAMES: Final = 16
_MOST_KEPT: Final = 256
_MOST_PARTS: Final = 20_000
"""How many parts of a body are looked at: no other Python code runs meanwhile."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A known field that this service ignores, and names if it asks for something.

    Attributes:
        neutral: the values, apart from null, empty lists, objects and texts, that ask for nothing.
    """

    neutral: tuple[Any, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        """Whether ignoring the field changes nothing."""
        if value is None or (isinstance(value, str | list | dict) and not value):
            return True
        # True equals 1 in Python, and must not pass for it.
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.neutral)


@dataclass(frozen=True, slots=True)
class Refused(Ignored):
    """A field that would change the answer, so it must not be ignored.

    Attributes:
        instead: the field to set instead; empty: there is none.
        because: the problem, for the caller who set the field.
    """

    instead: str = ""
    because: str = "would change the answer, and this service does not support it"

    @property
    def sentence(self) -> str:
        """The problem, and what to do instead."""
        return f"{self.because}; set {self.instead} instead" if self.instead else self.because


_MEDIA: Final = {
    "image": "images are",
    "image_url": "images are",
    "input_image": "images are",
    "computer_screenshot": "images are",
    "audio": "audio is",
    "audio_url": "audio is",
    "input_audio": "audio is",
    "video": "videos are",
    "video_url": "videos are",
    "input_video": "videos are",
    "file": "files are",
    "input_file": "files are",
    "document": "files are",
}
"""What a part of a conversation holds, by its type, if no model of this service reads it."""


def unread(kind: str) -> str | None:
    """The problem of a part of this type that no model of this service reads; None: another type."""
    return f"{held} not supported by this model" if (held := _MEDIA.get(kind)) is not None else None


_IMAGES: Final = Refused(because=f"{_MEDIA['image']} not supported by this model")
_AUDIO: Final = Refused(because=f"{_MEDIA['audio']} not supported by this model")


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
    "think": Refused(instead="chat_template_kwargs"),
    "thinking": Refused(instead="chat_template_kwargs"),
    "thinking_budget": Refused(),
    "safe_prompt": Refused((False,)),
    "images": _IMAGES,
    # Fields of OpenAI's that this service cannot follow.
    "functions": Refused(instead="tools"),
    "function_call": Refused(("auto", "none"), instead="tool_choice"),
    "audio": _AUDIO,
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
_OF_OTHER_ROUTES: Final[Mapping[str, Refused]] = {
    "guided_regex": Refused(),
    "guided_choice": Refused(),
    "chat_template_kwargs": Refused(),
    "n": Refused((1,)),
    "ignore_eos": Refused((False,)),
    "time_limit_ms": Refused(),
}
"""What only chats and completions have."""

OF_RESPONSES: Final[Mapping[str, Refused]] = {
    **OF_ANSWERS,
    **_OF_OTHER_ROUTES,
    "conversation": Refused(instead="previous_response_id"),
    "prompt": Refused(instead="input"),
    "messages": Refused(instead="input"),
    "max_tokens": Refused(instead="max_output_tokens"),
    "max_completion_tokens": Refused(instead="max_output_tokens"),
    "response_format": Refused(instead="text.format"),
    "guided_json": Refused(instead="text.format"),
    "structured_outputs": Refused(instead="text.format"),
    "reasoning_effort": Refused(instead="reasoning.effort"),
    "stop": Refused(),
    "session_id": Refused(instead="previous_response_id"),
}
"""The same, with the fields of the other routes that would change an answer of this one."""

OF_ANTHROPIC: Final[Mapping[str, Refused]] = {
    **{name: refused for name, refused in OF_ANSWERS.items() if name != "thinking"},
    **_OF_OTHER_ROUTES,
    "enable_thinking": Refused(instead="thinking"),
    "input": Refused(instead="messages"),
    "prompt": Refused(instead="messages"),
    "instructions": Refused(instead="system"),
    "max_completion_tokens": Refused(instead="max_tokens"),
    "max_output_tokens": Refused(instead="max_tokens"),
    "response_format": Refused(instead="output_config.format"),
    "output_format": Refused(instead="output_config.format"),
    "guided_json": Refused(instead="output_config.format"),
    "structured_outputs": Refused(instead="output_config.format"),
    "reasoning_effort": Refused(instead="output_config.effort"),
    "mcp_servers": Refused(),
    "stop": Refused(instead="stop_sequences"),
    "session_id": Refused(),
}
"""The same for Anthropic's dialect."""

OF_MESSAGES: Final[Mapping[str, Refused]] = {"audio": _AUDIO, "images": _IMAGES}
OF_FORMS: Final[Mapping[str, Refused]] = {"grammar": Refused(), "structural_tag": Refused()}
"""Fields of a chat's messages, and of the form of an answer, that would change the answer."""

OF_READINGS: Final[Mapping[str, Refused]] = {
    "truncate_prompt_tokens": Refused(),
    "truncate": Refused((False, "NONE")),
    "max_tokens_per_doc": Refused(),
    "max_chunks_per_doc": Refused(),
    "rank_fields": Refused(),
    "instruction": Refused(),
    "mm_processor_kwargs": Refused(),
}
"""Fields of other servers that would change embeddings, scores and numbers of tokens."""


def ignored_fields(body: BaseModel) -> list[str]:
    """What this service ignores in a body, such as `messages[0].mood` and `tools[3] (web_search)`; drops the values.

    After 16 names, a last entry says how many more there are. Raises InvalidRequest for a field that would change the
    answer.
    """
    found: set[str] = set()
    num_more = 0
    for place, part in _parts(body):
        unknown = part.model_extra or {}
        refused: Mapping[str, Refused] = getattr(part, "refused_fields", {})
        for name in refused.keys() & unknown.keys():
            if not refused[name].is_neutral(unknown[name]):
                raise InvalidRequest(joined(place, name), refused[name].sentence)
        named = list(_named(place, part, unknown, refused))
        room = max(0, _MOST_KEPT - len(found))
        found.update(named[:room])
        num_more += len(named[room:])
        unknown.clear()
    first = sorted(found, key=lambda each: (each.count(".") + each.count("["), each))
    num_more += len(first[_MOST_NAMES:])
    return first[:_MOST_NAMES] + ([f"({num_more} more)"] if num_more else [])


def _named(place: str, part: BaseModel, unknown: Mapping[str, Any], refused: Mapping[str, Refused]) -> Iterator[str]:
    """Yields what is ignored of a part."""
    if getattr(part, "is_skipped", False):
        yield f"{place} ({shown(getattr(part, 'type', None) or '')})"
        return
    for name, value in unknown.items():
        if value is not None and name not in refused:
            yield joined(place, name)
    for name, ignored in _ignored_of(type(part)).items():
        if name in part.model_fields_set and not ignored.is_neutral(getattr(part, name)):
            yield joined(place, name)
    for entry in getattr(part, "ignored_values", ()):
        yield f"{place}.{entry}" if place else entry


@cache
def _ignored_of(kind: type[BaseModel]) -> Mapping[str, Ignored]:
    """The known fields of a class that this service ignores."""
    return {
        name: each for name, field in kind.model_fields.items() for each in field.metadata if isinstance(each, Ignored)
    }


def _parts(body: BaseModel) -> Iterator[tuple[str, BaseModel]]:
    """Yields the parts of a body that have fields, each with its place, and first the body itself."""
    parts: list[tuple[str, BaseModel]] = [("", body)]
    for place, part in islice(_popped(parts), _MOST_PARTS):
        yield place, part
        for name in part.model_fields_set & type(part).model_fields.keys():
            value = getattr(part, name)
            path = joined(place, type(part).model_fields[name].alias or name)
            if isinstance(value, BaseModel):
                parts.append((path, value))
            elif isinstance(value, list) and value and isinstance(value[0], BaseModel | str):
                parts += [(f"{path}[{index}]", each) for index, each in enumerate(value) if isinstance(each, BaseModel)]


def _popped(parts: list[tuple[str, BaseModel]]) -> Iterator[tuple[str, BaseModel]]:
    while parts:
        yield parts.pop()
