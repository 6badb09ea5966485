"""Builds requests from a caller's values. It refuses only what protobuf cannot carry; the service checks ranges."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, runtime_checkable

from corolla.chassis.errors import InvalidRequest
from corolla.sdk.fields import extend_field, set_field, set_fields
from corolla.sdk.messages import AnyMessage, add_messages
from corolla.sdk.tools import AnyTool, AnyToolChoice, add_tools, set_tool_choice
from corolla.v1 import generation_pb2 as pb


@runtime_checkable
class SchemaSource(Protocol):
    """An object that returns its JSON Schema, such as a pydantic model class."""

    def model_json_schema(self) -> Mapping[str, Any]: ...


ResponseFormat = Mapping[str, Any] | SchemaSource
"""The form of an answer: `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {"schema": ...}}`, both
as in the OpenAI API; or `{"type": "regex", "regex": ...}`, `{"type": "choice", "choice": [...]}`, `{"type": "lark",
"lark": ...}`; or a pydantic model class. `{"type": "text"}` is any text."""


def set_format(message: pb.ResponseFormat, given: object) -> None:
    """Writes a `ResponseFormat` into a request. Raises InvalidRequest if `given` is something else."""
    if not isinstance(given, Mapping):
        if not isinstance(given, SchemaSource):
            raise InvalidRequest("response_format", "must be a mapping with a 'type', or a class of pydantic's models")
        given = {"type": "json_schema", "json_schema": {"schema": given.model_json_schema()}}
    form: Mapping[str, Any] = given
    kind = form.get("type")
    try:
        match kind:
            case "text":
                pass
            case "json_object":
                message.json_object.SetInParent()
            case "json_schema":
                message.json_schema = json.dumps(form["json_schema"]["schema"])
                message.strict = bool(form["json_schema"].get("strict"))
            case "choice":
                message.choice.texts.extend(form["choice"])
                message.choice.SetInParent()
            case "regex" | "lark":
                setattr(message, kind, form[kind])
            case _:
                raise InvalidRequest("response_format", "'type' is unknown")
    except (KeyError, TypeError, ValueError):
        raise InvalidRequest("response_format", f"the description of {kind} is missing or not valid") from None


Prompt = str | Sequence[int]


class AnswerOptions(TypedDict, total=False):
    """The options of an answer. An option that is left out is off, or has the service's default.

    Attributes:
        max_tokens: the most new tokens.
        temperature: 0 is greedy; up to 100. Left out: 1 when top_k, top_p, min_p or seed is given, otherwise greedy.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set of tokens with this total probability; in (0, 1].
        min_p: keep tokens at least this likely relative to the most likely one; in [0, 1].
        repetition_penalty: divides (or multiplies) the logits of tokens seen so far; in (0, 100], 1 is off.
        presence_penalty: a number to subtract once from the logit of each token already in the answer; in [-2, 2].
        frequency_penalty: a number to subtract from a token's logit for each time that the answer contains the token;
            in [-2, 2].
        seed: the same seed, prompt and options give the same tokens.
        logit_bias: numbers to add to the logits of token ids, before all else; in [-100, 100], at most 1024 ids.
        response_format: the form of the answer; a token that would break it is never chosen. See `ResponseFormat`.
        stop: the answer ends before the first of these texts; one or up to 16, each of 1 to 256 characters.
        ignore_eos: continue after end-of-sequence tokens.
        time_limit_s: end the answer after this many seconds.
        speculation: how tokens are drafted ahead, which changes the speed but no token: "off", "prompt_lookup" or
            "draft_model"; left out, the service chooses.
        max_draft_tokens: the most tokens that are drafted in one step, 1 to 64.
        standby: whether other servers keep copies of what is computed, so that the answer goes on at once after a
            loss: "off", "auto" (long texts) or "all"; at most, and left out, what the tenant has.
        request_id: names the request, so that it can be resumed after its stream broke: send it again with the same
            name, to any client service. Choose a new name for each request.
        resume_from: with the same `request_id`, the token ids of the answer that arrived, or only their number; with a
            number, the service generates them again. The new stream has only the tokens after them.
        cache_salt: only requests with the same salt share what the service computes for the prompt.
        logprobs: report the log-probability of each token and of this many most likely tokens (0 to 20).
        model: name of the model; empty takes the only model that the service has.
        adapter: name of an adapter of the model; empty: the session's adapter, or none.
        timeout: seconds after which the call fails with DeadlineExceeded; left out, the client's own.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    response_format: ResponseFormat | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    time_limit_s: float | None
    speculation: str | None
    max_draft_tokens: int | None
    standby: str | None
    request_id: str | None
    resume_from: Sequence[int] | int | None
    cache_salt: str | None
    logprobs: int | None
    model: str
    adapter: str
    timeout: float | None


class GenerateOptions(AnswerOptions, total=False):
    """The options of a completion: the options of all answers, and three more.

    Attributes:
        n: independent completions of the prompt, 1 to 16; completion i is seeded with seed + i.
        session: id of a session that the prompt continues.
        echo: whether the prompt comes back, with the log-probabilities of its tokens if `logprobs` is set; then
            `max_tokens` may be 0.
    """

    n: int | None
    session: str
    echo: bool


class ReadOptions(TypedDict, total=False):
    """The options of calls that read a text and answer nothing. `AnswerOptions` describes them."""

    model: str
    adapter: str
    cache_salt: str | None
    timeout: float | None


class ChatOptions(AnswerOptions, total=False):
    """The options of a chat: the options of all answers, and some more.

    Attributes:
        n: independent answers, 1 to 16, outside of sessions; answer i is seeded with seed + i.
        tools: the tools that the model may call; see `AnyTool`.
        tool_choice: "auto", the default if there are tools; "none", "required", or the tool that must be called.
        parallel_tool_calls: whether one answer may call several tools; True by default.
        continue_last_message: whether the answer continues the last message, which must be an assistant's.
        template_arguments: arguments for the model's chat template, such as `{"enable_thinking": False}`.
    """

    n: int | None
    tools: Sequence[AnyTool] | None
    tool_choice: AnyToolChoice | None
    parallel_tool_calls: bool | None
    continue_last_message: bool
    template_arguments: Mapping[str, Any] | None


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Returns the request of a completion.

    Raises:
        InvalidRequest: A value is of a wrong kind.
        TypeError: An option does not exist.
    """
    _refuse_unknown(options, GenerateOptions)
    request = pb.GenerateRequest()
    _set_prompt(request, prompt, "text", "tokens", "prompt")
    set_fields(request, options, "echo", session="session_id", n="num_completions")
    _set_shared(request, options)
    return request


def score_request(prompt: Prompt, continuation: Prompt, options: ReadOptions, logprobs: int | None) -> pb.ScoreRequest:
    """Returns the request of a score. Raises InvalidRequest if a value is of a wrong kind."""
    request = pb.ScoreRequest()
    if prompt:
        _set_prompt(request, prompt, "text", "tokens", "prompt")
    _set_prompt(request, continuation, "continuation_text", "continuation_tokens", "continuation")
    set_field(request, "logprobs", logprobs, "logprobs")
    _set_read(request, options)
    return request


def embed_request(
    text: Prompt, options: ReadOptions, pooling: str, dimensions: int | None, *, is_normalised: bool
) -> pb.EmbedRequest:
    """Returns the request of an embedding. Raises InvalidRequest if a value is of a wrong kind."""
    poolings = {"mean": pb.EmbedRequest.POOLING_MEAN, "last": pb.EmbedRequest.POOLING_LAST}
    if pooling not in poolings:
        raise InvalidRequest("pooling", "must be mean or last")
    request = pb.EmbedRequest(pooling=poolings[pooling], without_normalisation=not is_normalised)
    _set_prompt(request, text, "text", "tokens", "text")
    set_field(request, "dimensions", dimensions, "dimensions")
    _set_read(request, options)
    return request


def _set_prompt(
    request: pb.GenerateRequest | pb.ScoreRequest | pb.EmbedRequest, prompt: Prompt, text: str, tokens: str, name: str
) -> None:
    """Sets one of two fields: `text`, or the ids of `tokens`."""
    if isinstance(prompt, str):
        set_field(request, text, prompt, name)
    elif isinstance(prompt, bytes | bytearray):
        raise InvalidRequest(name, "must be text or a sequence of token ids, not bytes")
    else:
        getattr(request, tokens).SetInParent()
        extend_field(getattr(request, tokens), "ids", prompt, name)


def _set_read(request: pb.ScoreRequest | pb.EmbedRequest, options: ReadOptions) -> None:
    _refuse_unknown(options, ReadOptions)
    set_fields(request, options, "model", "adapter", "cache_salt")


def chat_request(messages: Sequence[AnyMessage], options: ChatOptions, session_id: str = "") -> pb.ChatRequest:
    """Returns the request of a chat.

    Raises:
        InvalidRequest: A value is of a wrong kind.
        TypeError: An option does not exist.
    """
    _refuse_unknown(options, ChatOptions)
    request = pb.ChatRequest()
    add_messages(request.messages, messages)
    set_field(request, "session_id", session_id, "session")
    set_fields(request, options, "parallel_tool_calls", "continue_last_message", n="num_completions")
    if (choice := options.get("tool_choice")) is not None:
        set_tool_choice(request.tool_choice, choice)
    _set_template(request, options.get("tools"), options.get("template_arguments"))
    _set_shared(request, options)
    return request


def tokenize_request(
    text: str | Sequence[AnyMessage],
    model: str = "",
    *,
    special_tokens: bool = True,
    tools: Sequence[AnyTool] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(without_special_tokens=not special_tokens)
    set_field(request, "model", model, "model")
    if isinstance(text, str):
        set_field(request, "text", text, "text")
    else:
        request.chat.SetInParent()
        add_messages(request.chat.messages, text)
        _set_template(request.chat, tools, template_arguments)
    return request


def _set_template(
    request: pb.ChatRequest | pb.Conversation, tools: Sequence[AnyTool] | None, arguments: Mapping[str, Any] | None
) -> None:
    if tools is not None:
        add_tools(request, tools)
    try:
        request.template_arguments.update(arguments or {})
    except (TypeError, ValueError, OverflowError, AttributeError):
        raise InvalidRequest("template_arguments", "must be a mapping of names to values of JSON") from None


_SAMPLING = tuple(field.name for field in pb.SamplingParameters.DESCRIPTOR.fields if field.name != "logit_bias")


def _set_shared(request: pb.GenerateRequest | pb.ChatRequest, options: Mapping[str, Any]) -> None:
    set_fields(request, options, "model", "adapter", "logprobs", "request_id", "cache_salt")
    _set_received(request, options.get("resume_from"))
    set_fields(request.sampling, options, *_SAMPLING)
    _set_biases(request.sampling, options.get("logit_bias"))
    if (form := options.get("response_format")) is not None:
        set_format(request.response_format, form)
    if (speculation := options.get("speculation")) is not None:
        request.speculation.mode = pb.SpeculationMode.Value(_mode(pb.SpeculationMode, speculation, "speculation"))
    set_fields(request.speculation, options, "max_draft_tokens")
    if (standby := options.get("standby")) is not None:
        request.standby = pb.StandbyMode.Value(_mode(pb.StandbyMode, standby, "standby"))
    stopping = request.stopping
    set_fields(stopping, options, "max_tokens", "ignore_eos")
    stop = options.get("stop")
    if stop is not None:
        extend_field(stopping, "stop", [stop] if isinstance(stop, str) else stop, "stop")
    time_limit_s = options.get("time_limit_s")
    if time_limit_s is not None:
        try:
            milliseconds = round(time_limit_s * 1000)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequest("time_limit_s", "must be a number of seconds") from None
        set_field(stopping, "time_limit_ms", milliseconds, "time_limit_s")


def _mode(modes: Any, given: object, name: str) -> str:
    """The protocol's name of the mode that a caller gives. The one of number 0 stands for what is not given."""
    known: dict[str, str] = {each.rpartition("_MODE_")[2].lower(): each for each, number in modes.items() if number}
    if not isinstance(given, str) or given not in known:
        raise InvalidRequest(name, f"must be one of {', '.join(known)}")
    return known[given]


def _set_biases(sampling: pb.SamplingParameters, biases: Mapping[int, float] | None) -> None:
    try:
        sampling.logit_bias.update(biases or {})
    except (TypeError, ValueError, AttributeError):
        raise InvalidRequest("logit_bias", "must be numbers by token ids") from None


def _set_received(request: pb.GenerateRequest | pb.ChatRequest, received: Sequence[int] | int | None) -> None:
    if isinstance(received, str | bytes | bytearray):
        raise InvalidRequest("resume_from", "must be token ids or their number")
    if isinstance(received, Sequence):
        extend_field(request.received, "ids", received, "resume_from")
        received = len(received)
    set_field(request, "resume_from_index", received, "resume_from")


def _refuse_unknown(options: Mapping[str, Any], known: type[Any]) -> None:
    unknown = sorted(set(options) - set(known.__annotations__))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(known.__annotations__))}")
