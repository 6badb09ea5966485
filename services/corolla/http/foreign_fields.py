"""Fields that this service does not follow: which are ignored, and which are refused by name. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Final

from pydantic import BaseModel

from corolla.chassis.errors import InvalidRequest
from corolla.http.field_paths import joined, shown

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
        """Ignoring a field of this value changes nothing."""
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


_LARK: Final = 'response_format with the type "lark"'


def _all(names: str, *neutral: Any, instead: str = "") -> dict[str, Refused]:
    """The fields of these names, all of which are refused in the same way."""
    return dict.fromkeys(names.split(), Refused(neutral, instead))


_MEDIA_FIELDS: Final[Mapping[str, Refused]] = {
    name: Refused(because=f"{_MEDIA[kind]} not supported by this model")
    for name, kind in (("audio", "audio"), ("images", "image"))
}

OF_ANSWERS: Final[Mapping[str, Refused]] = {
    # Fields of vLLM.
    **_all("truncate_prompt_tokens chat_template documents guided_whitespace_pattern logits_processors prompt_embeds"),
    **_all("mm_processor_kwargs thinking_token_budget"),
    **_all("min_tokens", 0),
    **_all("length_penalty", 1),
    **_all("include_stop_str_in_output use_beam_search early_stopping", False),
    **_all("skip_special_tokens spaces_between_special_tokens", True),
    **_all("stop_token_ids", instead="stop"),
    **_all("bad_words", instead="logit_bias"),
    **_all("allowed_token_ids", instead="response_format"),
    **_all("guided_grammar", instead=_LARK),
    # Fields of SGLang, llama.cpp, TGI, Ollama and others.
    **_all("structural_tag custom_logit_processor thinking_budget"),
    **_all("no_repeat_ngram_size top_a mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range", 0),
    **_all("epsilon_cutoff eta_cutoff smoothing_factor", 0),
    **_all("top_n_sigma", -1, 0),
    **_all("typical_p tfs_z", 1),
    **_all("no_stop_trim watermark safe_prompt", False),
    **_all("ebnf grammar", instead=_LARK),
    **_all("regex json_schema", instead="response_format"),
    **_all("lora_path adapter_id", instead="model"),
    **_all("n_predict num_predict", -1, instead="max_tokens"),
    **_all("max_new_tokens", instead="max_tokens"),
    **_all("repeat_penalty", 1, instead="repetition_penalty"),
    **_all("enable_thinking think thinking", instead="chat_template_kwargs"),
    # Fields of OpenAI's that this service cannot follow.
    **_all("web_search_options"),
    **_all("functions", instead="tools"),
    **_all("function_call", "auto", "none", instead="tool_choice"),
    **_MEDIA_FIELDS,
}
"""Fields of other servers, by name, that would change an answer."""

OF_CHATS: Final[Mapping[str, Refused]] = {
    **OF_ANSWERS,
    **_all("prompt", instead="messages"),
    **_all("max_output_tokens", instead="max_completion_tokens"),
}
OF_COMPLETIONS: Final[Mapping[str, Refused]] = {
    **OF_ANSWERS,
    **_all("messages tools reasoning_effort chat_template_kwargs"),
    **_all("max_completion_tokens max_output_tokens", instead="max_tokens"),
}

_OF_OTHER_ROUTES: Final[Mapping[str, Refused]] = {
    **_all("guided_regex guided_choice chat_template_kwargs time_limit_ms"),
    **_all("n", 1),
    **_all("ignore_eos", False),
}
"""What only chats and completions have."""

OF_RESPONSES: Final[Mapping[str, Refused]] = {
    **OF_ANSWERS,
    **_OF_OTHER_ROUTES,
    **_all("conversation session_id", instead="previous_response_id"),
    **_all("prompt messages", instead="input"),
    **_all("max_tokens max_completion_tokens", instead="max_output_tokens"),
    **_all("response_format guided_json structured_outputs", instead="text.format"),
    **_all("reasoning_effort", instead="reasoning.effort"),
    **_all("stop"),
}
"""The same, with the fields of the other routes that would change an answer of this one."""

OF_ANTHROPIC: Final[Mapping[str, Refused]] = {
    **{name: refused for name, refused in OF_ANSWERS.items() if name != "thinking"},
    **_OF_OTHER_ROUTES,
    **_all("enable_thinking", instead="thinking"),
    **_all("input prompt", instead="messages"),
    **_all("instructions", instead="system"),
    **_all("max_completion_tokens max_output_tokens", instead="max_tokens"),
    **_all("response_format output_format guided_json structured_outputs", instead="output_config.format"),
    **_all("reasoning_effort", instead="output_config.effort"),
    **_all("stop", instead="stop_sequences"),
    **_all("mcp_servers session_id"),
}
"""The same for Anthropic's dialect."""

OF_MESSAGES: Final[Mapping[str, Refused]] = _MEDIA_FIELDS
OF_FORMS: Final[Mapping[str, Refused]] = _all("grammar structural_tag")
"""Fields of a chat's messages, and of the form of an answer, that would change the answer."""

OF_READINGS: Final[Mapping[str, Refused]] = {
    **_all("truncate_prompt_tokens max_tokens_per_doc max_chunks_per_doc rank_fields instruction mm_processor_kwargs"),
    **_all("truncate", False, "NONE"),
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
