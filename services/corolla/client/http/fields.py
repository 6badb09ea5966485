"""Fields that several HTTP requests share, and their conversion to gRPC's protocol. The servicer checks ranges."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from corolla.chassis.errors import InvalidRequest
from corolla.v1 import generation_pb2 as pb

DEFAULT_TEMPERATURE: Final = 1.0
"""OpenAI's default. The default in gRPC's protocol is greedy decoding."""


Element = TypeVar("Element")
Name = TypeVar("Name")

ListOf = Annotated[list[Element], Field(fail_fast=True)]
MappingOf = Annotated[dict[Name, Element], Field(fail_fast=True)]
"""Lists and mappings fail at the first wrong element: collecting further faults would waste memory and time."""

Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 32) - 1)]
Tolerated = Field(None, description="Taken, and without effect here.")


class Fields(BaseModel):
    """A body, or a part of one. Unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StreamOptions(Fields):
    """What a stream sends in addition to the answer."""

    include_usage: bool = Field(False, description="A last event with the usage, and no choice.")
    include_obfuscation: bool | None = Tolerated


class SamplingFields(Fields):
    """How tokens are chosen, in all requests."""

    model: str = Field("", max_length=512, description="Empty: the only model that the service has.")
    temperature: float | None = Field(None, description="0 is greedy; unset is 1, as OpenAI has it.")
    top_p: float | None = None
    user: str | None = Tolerated
    metadata: MappingOf[str, str] | None = Tolerated
    service_tier: str | None = Tolerated
    safety_identifier: str | None = Tolerated
    prompt_cache_key: str | None = Tolerated
    prompt_cache_retention: str | None = Tolerated
    cache_salt: str = Field("", description="What is computed is shared only with requests of the same salt.")

    def sampling(self) -> pb.SamplingParameters:
        """The sampling parameters in the protocol of gRPC."""
        sampling = pb.SamplingParameters(
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature
        )
        _set(sampling, self, ("top_p",))
        return sampling


class AnswerFields(SamplingFields):
    """How an answer is made, for completions and chats."""

    n: Int32 | None = Field(None, description="Answers, 1 to 16.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | ListOf[str] | None = Field(None, description="The answer ends before the first of these texts.")
    seed: Int64 | None = None
    max_tokens: Int32 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: MappingOf[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None = Field(
        None, description="Added to the logits of these tokens, which are named by their ids."
    )
    top_k: Int32 | None = Field(None, description="0 is off.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    time_limit_ms: Int64 | None = Field(None, description="The answer ends then with what there is.")
    speculation: Literal["off", "prompt_lookup", "draft_model"] | None = None
    max_draft_tokens: Int32 | None = None
    session_id: str = Field("", description="Continue this session: only what is new is sent.")
    request_id: str = Field("", description="Names the request, so that it can go on after its stream broke.")
    resume_from: Count = Field(0, description="With a request_id: so many tokens of the answer have come.")
    received: ListOf[TokenId] = Field([], description="Just these tokens, from a caller that still has them.")
    return_token_ids: bool | None = Field(
        None, description="Whether to return the ids of tokens. Unset: only with a request_id."
    )
    store: bool | None = Tolerated

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_token_ids(self) -> bool:
        return bool(self.request_id) if self.return_token_ids is None else self.return_token_ids

    def sampling(self) -> pb.SamplingParameters:
        sampling = super().sampling()
        names = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
        _set(sampling, self, names)
        for token_id, bias in (self.logit_bias or {}).items():
            sampling.logit_bias[int(token_id)] = bias
        return sampling

    def stopping(self, max_tokens: int | None) -> pb.StoppingParameters:
        """The stopping parameters in the protocol of gRPC."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        stopping = pb.StoppingParameters(stop=stop, ignore_eos=self.ignore_eos)
        _set(stopping, self, ("time_limit_ms",))
        if max_tokens is not None:
            stopping.max_tokens = max_tokens
        return stopping

    def shared(self, max_tokens: int | None) -> dict[str, Any]:
        """The fields that completions and chats share, by their names in gRPC's protocol."""
        mode = pb.SpeculationMode.Value(f"SPECULATION_MODE_{(self.speculation or 'unspecified').upper()}")
        speculation = pb.SpeculationParameters(mode=mode)
        _set(speculation, self, ("max_draft_tokens",))
        return {
            "model": self.model,
            "sampling": self.sampling(),
            "stopping": self.stopping(max_tokens),
            "speculation": speculation,
            "session_id": self.session_id,
            "request_id": self.request_id,
            "resume_from_index": self.resume_from,
            "received": pb.TokenIds(ids=self.received),
            "cache_salt": self.cache_salt,
            "num_completions": self.n,
        }


class JsonSchema(Fields):
    """A schema with its name."""

    name: str | None = None
    description: str | None = Tolerated
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Answers fit the schema in any case.")


class TextFormat(Fields):
    type: Literal["text"]


class JsonObjectFormat(Fields):
    type: Literal["json_object"]


class JsonSchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Fields):
    type: Literal["regex"]
    regex: str


class ChoiceFormat(Fields):
    type: Literal["choice"]
    choice: ListOf[str]


class LarkFormat(Fields):
    type: Literal["lark"]
    lark: str = Field(description="A grammar as llguidance reads it.")


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | LarkFormat,
    Field(discriminator="type", description="What the answer must be."),
]


def response_format(given: ResponseFormat | None) -> pb.ResponseFormat | None:
    """The form of an answer in the protocol of gRPC. Raises InvalidRequest."""
    match given:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return pb.ResponseFormat(json_object=pb.JsonObject())
        case JsonSchemaFormat(json_schema=schema):
            return json_schema_format(schema.json_schema, "response_format.json_schema.schema")
        case RegexFormat(regex=regex):
            return pb.ResponseFormat(regex=regex)
        case ChoiceFormat(choice=texts):
            return pb.ResponseFormat(choice=pb.Choice(texts=texts))
        case LarkFormat(lark=lark):
            return pb.ResponseFormat(lark=lark)


def json_schema_format(schema: Mapping[str, Any] | None, field: str) -> pb.ResponseFormat:
    """The form that a JSON schema describes. Raises InvalidRequest if the schema is missing."""
    if schema is None:
        raise InvalidRequest(field, "must be set")
    return pb.ResponseFormat(json_schema=as_json(schema))


def as_json(value: Any) -> str:
    """The value as JSON in one line, with its members in the given order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _set(target: Any, source: BaseModel, names: Sequence[str]) -> None:
    """Copies the named fields that have a value from `source` to `target`."""
    for name in names:
        if (value := getattr(source, name)) is not None:
            setattr(target, name, value)
