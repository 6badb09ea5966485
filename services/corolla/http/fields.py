"""Fields that several HTTP requests share, and their conversion to gRPC's protocol. The servicer checks ranges."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from annotated_types import MaxLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from corolla.chassis.errors import InvalidRequest, ResourceNotFound
from corolla.chassis.tenant_limits import StandbyMode
from corolla.client.api.requests import MAX_STOP_SEQUENCES
from corolla.client.text.formats import MAX_CHOICES
from corolla.client.text.schemas import parsed
from corolla.decoding.parameters import MAX_BIASED_TOKENS
from corolla.http.body_values import MAX_VALUES
from corolla.http.field_paths import Paths, in_callers_words
from corolla.http.foreign_fields import OF_ANSWERS, OF_FORMS, Ignored, Refused
from corolla.v1 import generation_pb2 as pb

DEFAULT_TEMPERATURE: Final = 1.0
"""OpenAI's default. The default in gRPC's protocol is greedy decoding."""

UNLIMITED: Final = -1
"""Callers of other servers send this number of tokens to ask for as many as possible."""


Element = TypeVar("Element")
Name = TypeVar("Name")

ListOf = Annotated[list[Element], Field(fail_fast=True)]
MappingOf = Annotated[dict[Name, Element], Field(fail_fast=True)]
"""Lists and mappings fail at the first wrong element: collecting further faults would waste memory and time. Each also
has a most number of elements, at which reading ends."""

ANOTHER: Final = "another kind"
"""The tag of what this service skips."""

MAX_NAMES: Final = 64
"""The most elements of a list that is only looked through for some names."""


def _whole(given: Any) -> Any:
    """The number as an integer if it is whole: JSON has no integers, and some programs write 16.0."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


Whole = Annotated[int, BeforeValidator(_whole)]
Int32 = Annotated[Whole, Field(ge=-(1 << 31), lt=1 << 31)]
Int64 = Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 63)]
Count = Annotated[Whole, Field(ge=0, lt=1 << 31)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 32) - 1)]
TokenIds = Annotated[ListOf[TokenId], MaxLen(MAX_VALUES)]
Tolerated = Field(None, description="Accepted, without effect.")
Unheeded = Field(None, description="Without effect; the reply's header X-Corolla-Ignored names it.")

_PATHS: Final[Paths] = {
    **{f"sampling.{each.name}": each.name for each in pb.SamplingParameters.DESCRIPTOR.fields},
    **{f"stopping.{each.name}": each.name for each in pb.StoppingParameters.DESCRIPTOR.fields},
    "adapter": "model",
    "continue_last_message": "continue_final_message",
    "num_completions": "n",
    "received.ids": "received",
    "resume_from_index": "resume_from",
    "speculation.max_draft_tokens": "max_draft_tokens",
    "speculation.mode": "speculation",
    "template_arguments": "chat_template_kwargs",
}
"""What has other paths here than in the protocol, in all requests."""

Form = tuple[str, pb.ResponseFormat]
"""The form of an answer in the protocol of gRPC, and the path of what describes it in the body."""

Choices = Annotated[ListOf[str], MaxLen(MAX_CHOICES)]
LogitBias = Annotated[
    MappingOf[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float],
    MaxLen(MAX_BIASED_TOKENS),
    BeforeValidator(lambda given: {} if given == [] else given),
]
"""Numbers by token ids. An empty list is an empty mapping, since PHP writes both in the same way."""

Text = Annotated[str, BeforeValidator(lambda given: "" if given is None else given, json_schema_input_type=str | None)]
Flag = Annotated[
    bool, BeforeValidator(lambda given: False if given is None else given, json_schema_input_type=bool | None)
]
"""A text or a flag that callers may leave out or set to null, which is the empty text, or false."""
ModelName = Annotated[Text, Field(max_length=512, description="Empty: the only model that the service has.")]


class Fields(BaseModel):
    """A body, or a part of one. Unknown fields are kept apart for `ignored_fields`.

    Attributes:
        refused_fields: the unknown fields of a body that are refused by name, because they would change the answer.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    refused_fields: ClassVar[Mapping[str, Refused]] = {}

    @property
    def is_skipped(self) -> bool:
        """The service ignores the whole part."""
        return False

    @property
    def ignored_values(self) -> Sequence[str]:
        """The values of known fields that the service ignores, such as `include[0] (sources)`."""
        return ()


class Skipped(Fields):
    """A part of a kind that this service does not know, such as a tool that runs at OpenAI."""

    type: str

    @property
    def is_skipped(self) -> bool:
        return True


class Body(Fields):
    """The body of a request, which becomes one or more requests in the protocol of gRPC."""

    def paths(self, number: int = 0) -> Paths:
        """Where the body has what a request of the protocol has.

        Args:
            number: which one of several requests.
        """
        return {}

    @contextmanager
    def in_own_words(self, number: int = 0) -> Iterator[None]:
        """Names fields by their paths in the body where the servicer refuses a request; `number` is that of `paths`."""
        try:
            yield
        except (InvalidRequest, ResourceNotFound) as refusal:
            raise in_callers_words(refusal, self.paths(number)) from None


class StreamOptions(Fields):
    """What a stream sends in addition to the answer."""

    include_usage: Flag = Field(False, description="A last event with the usage, and no choice.")
    continuous_usage_stats: Flag = Field(False, description="The usage so far in each event.")
    include_obfuscation: Annotated[Any, Ignored((False,))] = Unheeded


class SamplingFields(Body):
    """How tokens are chosen, in all requests."""

    refused_fields = OF_ANSWERS

    model: ModelName = ""
    temperature: float | None = Field(None, description="0 is greedy; unset is 1, as OpenAI has it.")
    top_p: float | None = Field(None, description="0 keeps only the most likely token.")
    top_k: Int32 | None = Field(None, description="0 and -1 are off.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    logit_bias: LogitBias | None = Field(
        None, description="Maps ids of tokens to numbers that are added to their logits."
    )
    user: Any = Tolerated
    metadata: dict[str, Any] | None = Tolerated
    service_tier: Annotated[Any, Ignored(("auto", "default"))] = Unheeded
    safety_identifier: Any = Tolerated
    prompt_cache_key: Any = Tolerated
    prompt_cache_retention: Annotated[Any, Ignored(("in-memory", "in_memory"))] = Unheeded
    cache_salt: Text = Field("", description="Requests share cached prefixes only with requests of the same salt.")

    def paths(self, number: int = 0) -> Paths:
        found = dict(_PATHS)
        for path, form in self._forms():
            kind = form.WhichOneof("format")
            found |= {"response_format": path, f"response_format.{kind}": path}
            found |= {"response_format.choice.texts": path} if kind == "choice" else {}
        return found

    def _forms(self) -> Iterator[Form]:
        """Yields each form of the answer that is set. Raises InvalidRequest for a schema that is missing or no object.

        A body may have several names for it.
        """
        yield from ()

    def form(self) -> pb.ResponseFormat | None:
        """The form of the answer, by whichever of its names it was given. Raises InvalidRequest for several."""
        forms = list(self._forms())
        if len(forms) > 1:
            raise InvalidRequest(forms[1][0], f"must not be set together with {forms[0][0]}")
        return forms[0][1] if forms else None

    def sampling(self) -> pb.SamplingParameters:
        """The sampling parameters in the protocol of gRPC."""
        values = {each.name: getattr(self, each.name) for each in pb.SamplingParameters.DESCRIPTOR.fields}
        if self.temperature is None:
            values["temperature"] = DEFAULT_TEMPERATURE
        if self.top_p == 0:
            values |= {"temperature": 0.0, "top_p": None}
        if self.top_k == -1:
            values["top_k"] = None
        biases = {int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()}
        return pb.SamplingParameters(**values | {"logit_bias": biases})

    def stopping(self, max_tokens: int | None, stop: Sequence[str] | None, **options: Any) -> pb.StoppingParameters:
        """The stopping parameters in the protocol of gRPC; `options` are its other fields."""
        return pb.StoppingParameters(
            max_tokens=None if max_tokens == UNLIMITED else max_tokens, stop=stop or (), **options
        )


class AnswerFields(SamplingFields):
    """How an answer is made, for completions and chats."""

    n: Int32 | None = Field(None, description="Number of answers, 1 to 16.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[ListOf[str], MaxLen(MAX_STOP_SEQUENCES)] | None = Field(
        None, description="The answer ends before the first of these texts."
    )
    max_tokens: Int32 | None = Field(None, description="Unset or -1: as many as context and quota allow.")
    response_format: "ResponseFormat | None" = None
    guided_json: str | dict[str, Any] | None = Field(None, description="As vLLM has it: a schema for the answer.")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    structured_outputs: "StructuredOutputs | None" = Field(None, description="The same in vLLM's newer form.")
    ignore_eos: Flag = False
    time_limit_ms: Int64 | None = Field(None, description="Milliseconds after which the answer ends as it is.")
    speculation: Literal["off", "prompt_lookup", "draft_model"] | None = None
    max_draft_tokens: Int32 | None = None
    standby: StandbyMode | None = Field(
        None, description="Whether the answer has standbys; at most what the tenant has."
    )
    session_id: Text = Field("", description="Continue this session: only what is new is sent.")
    request_id: Text = Field("", description="Names the request, so that it can go on after its stream broke.")
    resume_from: Count | None = Field(
        None, description="With a request_id: the number of tokens of the answer that the caller has."
    )
    received: TokenIds | None = Field(None, description="The ids of these tokens, if the caller still has them.")
    return_token_ids: bool | None = Field(
        None, description="True returns the ids of tokens. Unset: only with a request_id."
    )
    store: Annotated[Any, Ignored((False,))] = Unheeded

    @property
    def streamed_usage(self) -> dict[str, bool]:
        """What the stream says of its usage: at its end, and in each event so far."""
        options = self.stream_options or StreamOptions.model_validate({})
        return {"has_usage": options.include_usage, "has_continuous_usage": options.continuous_usage_stats}

    @property
    def has_token_ids(self) -> bool:
        return bool(self.request_id) if self.return_token_ids is None else self.return_token_ids

    def shared(self, max_tokens: int | None) -> dict[str, Any]:
        """The fields that completions and chats share, by their names in gRPC's protocol."""
        mode = pb.SpeculationMode.Value(f"SPECULATION_MODE_{(self.speculation or 'unspecified').upper()}")
        stop = [each for each in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if each]
        return {
            "model": self.model,
            "sampling": self.sampling(),
            "stopping": self.stopping(max_tokens, stop, ignore_eos=self.ignore_eos, time_limit_ms=self.time_limit_ms),
            "speculation": pb.SpeculationParameters(mode=mode, max_draft_tokens=self.max_draft_tokens),
            "standby": pb.StandbyMode.Value(f"STANDBY_MODE_{(self.standby or 'unspecified').upper()}"),
            "session_id": self.session_id,
            "request_id": self.request_id,
            "resume_from_index": self.resume_from or 0,
            "received": pb.TokenIds(ids=self.received or ()),
            "cache_salt": self.cache_salt,
            "num_completions": self.n,
            "continuous_usage": self.streamed_usage["has_continuous_usage"],
            "response_format": self.form(),
        }

    def _forms(self) -> Iterator[Form]:
        if self.response_format is not None:
            yield from self.response_format.forms("response_format")
        outputs = self.structured_outputs or StructuredOutputs.model_validate({})
        for path, schema in (("guided_json", self.guided_json), ("structured_outputs.json", outputs.json_schema)):
            if schema is not None:
                yield schema_form(parsed(schema, path) if isinstance(schema, str) else schema, path)
        for path, regex in (("guided_regex", self.guided_regex), ("structured_outputs.regex", outputs.regex)):
            if regex is not None:
                yield path, pb.ResponseFormat(regex=regex)
        for path, texts in (("guided_choice", self.guided_choice), ("structured_outputs.choice", outputs.choice)):
            if texts is not None:
                yield path, pb.ResponseFormat(choice=pb.Choice(texts=texts))
        if outputs.json_object and outputs.json_schema is None:
            yield schema_form({"type": "object"}, "structured_outputs.json_object")


class JsonSchema(Fields):
    """A schema with its name."""

    name: str | None = None
    description: Any = Tolerated
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="True refuses keywords that grammars cannot follow.")


class TextFormat(Fields):
    type: Literal["text"]

    def forms(self, place: str) -> Iterator[Form]:
        """Yields the form that this part of a body, at `place`, describes. Raises InvalidRequest."""
        yield from ()


class JsonObjectFormat(Fields):
    type: Literal["json_object"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="As llama.cpp has it.")

    def forms(self, place: str) -> Iterator[Form]:
        if self.json_schema is None:
            yield place, pb.ResponseFormat(json_object=pb.JsonObject())
        else:
            yield schema_form(self.json_schema, f"{place}.schema")


class JsonSchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    def forms(self, place: str) -> Iterator[Form]:
        given = self.json_schema
        yield schema_form(given.json_schema, f"{place}.json_schema.schema", is_strict=given.strict)


class RegexFormat(Fields):
    type: Literal["regex"]
    regex: str

    def forms(self, place: str) -> Iterator[Form]:
        yield f"{place}.regex", pb.ResponseFormat(regex=self.regex)


class ChoiceFormat(Fields):
    type: Literal["choice"]
    choice: Choices

    def forms(self, place: str) -> Iterator[Form]:
        yield f"{place}.choice", pb.ResponseFormat(choice=pb.Choice(texts=self.choice))


class LarkFormat(Fields):
    type: Literal["lark"]
    lark: str = Field(description="A grammar as llguidance reads it.")

    def forms(self, place: str) -> Iterator[Form]:
        yield f"{place}.lark", pb.ResponseFormat(lark=self.lark)


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | LarkFormat,
    Field(discriminator="type", description="What the answer must be."),
]


class StructuredOutputs(Fields):
    """The form of an answer, as vLLM has it."""

    refused_fields = OF_FORMS

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    json_object: Flag = False


AnswerFields.model_rebuild()


def are_several(given: Any) -> bool:
    """True for a list of texts, or of lists of token ids; False for one text, or the token ids of one."""
    return isinstance(given, list) and bool(given) and not isinstance(given[0], int)


def inputs_of(given: Any) -> list[str | list[int]]:
    """The inputs, of which each is a text or token ids. An empty list has none."""
    return given if are_several(given) else [given] if given or isinstance(given, str) else []


def as_input(given: str | list[int]) -> dict[str, Any]:
    """The field of a request in the protocol of gRPC that has a text or token ids."""
    return {"text": given} if isinstance(given, str) else {"tokens": pb.TokenIds(ids=given)}


def tag_of(given: Any, tags: Mapping[str, str], untyped: str = ANOTHER) -> str:
    """The tag of a part of a body, by the type that it names, before or after it is read.

    A tag differs from every name of a field: both stand in the location of a fault.

    Args:
        tags: the tags by type; a part of any other type is `ANOTHER`.
        untyped: the tag of a part that names no type.
    """
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return tags.get(kind, ANOTHER) if isinstance(kind, str) else untyped


def schema_form(schema: Any, path: str, *, is_strict: bool | None = None) -> Form:
    """The form that the JSON Schema at a path describes. Raises InvalidRequest if the schema is missing."""
    if schema is None:
        raise InvalidRequest(path, "must be set")
    return path, pb.ResponseFormat(json_schema=as_json(schema), strict=bool(is_strict))


def as_json(value: Any) -> str:
    """The value as JSON in one line, with its members in the given order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
