"""Requests from what the caller gave. Ranges are the service's to check; only what protobuf cannot carry is refused."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf.message import Message as ProtoMessage

from corolla.chassis.errors import InvalidRequest
from corolla.sdk.results import Message
from corolla.v1 import generation_pb2 as pb

Prompt = str | Sequence[int]
AnyMessage = Message | Mapping[str, str]


class ChatOptions(TypedDict, total=False):
    """How an answer is made. What is left out is off, or the service's default.

    Attributes:
        max_tokens: new tokens at most.
        temperature: 0 is greedy; up to 100. Left out: 1 when top_k, top_p, min_p or seed is given, otherwise greedy.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set of tokens with this total probability; in (0, 1].
        min_p: keep tokens at least this likely relative to the most likely one; in [0, 1].
        repetition_penalty: divides (or multiplies) the logits of tokens seen so far; in (0, 100], 1 is off.
        presence_penalty: subtracted once from the logit of each token already in the answer; in [-2, 2].
        frequency_penalty: subtracted for each time that a token stands in the answer; in [-2, 2].
        seed: the same seed, prompt and options give the same tokens.
        stop: the answer ends before the first of these texts; one or up to 16, each of 1 to 256 characters.
        ignore_eos: go on after end-of-sequence tokens.
        time_limit_s: end with what there is after this many seconds.
        speculation: how the answer is drafted ahead, which changes its speed and none of its tokens: "off",
            "prompt_lookup" or "draft_model"; the service's own choice otherwise.
        max_draft_tokens: tokens drafted in one step at most, 1 to 64.
        request_id: names the request, so that it can go on after its stream broke: make it again with the same name, at
            any client service. Draw a new one for each request.
        resume_from: with the same `request_id`, what came of the answer: its token ids, or only how many there were,
            in which case they are generated again. Only what follows is answered.
        cache_salt: what the service computes for the prompt is shared only with requests of the same salt.
        logprobs: report each token's log-probability, and those of this many most likely tokens (0 to 20).
        model: empty takes the only model that the service has.
        timeout: seconds after which the call fails with DeadlineExceeded; the client's own default otherwise.
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
    stop: str | Sequence[str] | None
    ignore_eos: bool
    time_limit_s: float | None
    speculation: str | None
    max_draft_tokens: int | None
    request_id: str | None
    resume_from: Sequence[int] | int | None
    cache_salt: str | None
    logprobs: int | None
    model: str
    timeout: float | None


class GenerateOptions(ChatOptions, total=False):
    """As for chats, and two more.

    Attributes:
        n: independent completions of the prompt, 1 to 16; completion i is seeded with seed + i.
        session: id of a session that the prompt continues.
    """

    n: int | None
    session: str


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Raises InvalidRequest for values of a wrong kind and TypeError for an option that does not exist."""
    _refuse_unknown(options, GenerateOptions)
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt, "prompt")
    elif isinstance(prompt, bytes | bytearray):
        raise InvalidRequest("prompt", "must be text or a sequence of token ids, not bytes")
    else:
        request.tokens.SetInParent()
        _extend(request.tokens, "ids", prompt, "prompt")
    _set(request, "session_id", options.get("session"), "session")
    _set(request, "num_completions", options.get("n"), "n")
    _set_shared(request, options)
    return request


def chat_request(messages: Sequence[AnyMessage], options: ChatOptions, session_id: str = "") -> pb.ChatRequest:
    """Raises InvalidRequest for values of a wrong kind and TypeError for an option that does not exist."""
    _refuse_unknown(options, ChatOptions)
    request = pb.ChatRequest()
    _add_messages(request.messages, messages)
    _set(request, "session_id", session_id, "session")
    _set_shared(request, options)
    return request


def tokenize_request(
    text: str | Sequence[AnyMessage], model: str = "", *, special_tokens: bool = True
) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(without_special_tokens=not special_tokens)
    _set(request, "model", model, "model")
    if isinstance(text, str):
        _set(request, "text", text, "text")
    else:
        request.chat.SetInParent()
        _add_messages(request.chat.messages, text)
    return request


_SAMPLING = tuple(field.name for field in pb.SamplingParameters.DESCRIPTOR.fields)

_SPECULATION_MODES = {
    "off": pb.SPECULATION_MODE_OFF,
    "prompt_lookup": pb.SPECULATION_MODE_PROMPT_LOOKUP,
    "draft_model": pb.SPECULATION_MODE_DRAFT_MODEL,
}


def _set_shared(request: pb.GenerateRequest | pb.ChatRequest, options: Mapping[str, Any]) -> None:
    _set(request, "model", options.get("model"), "model")
    _set(request, "logprobs", options.get("logprobs"), "logprobs")
    _set(request, "request_id", options.get("request_id"), "request_id")
    _set_received(request, options.get("resume_from"))
    _set(request, "cache_salt", options.get("cache_salt"), "cache_salt")
    for name in _SAMPLING:
        _set(request.sampling, name, options.get(name), name)
    speculation = options.get("speculation")
    if speculation is not None:
        if not isinstance(speculation, str) or speculation not in _SPECULATION_MODES:
            raise InvalidRequest("speculation", f"must be one of {', '.join(_SPECULATION_MODES)}")
        request.speculation.mode = _SPECULATION_MODES[speculation]
    _set(request.speculation, "max_draft_tokens", options.get("max_draft_tokens"), "max_draft_tokens")
    stopping = request.stopping
    _set(stopping, "max_tokens", options.get("max_tokens"), "max_tokens")
    _set(stopping, "ignore_eos", options.get("ignore_eos"), "ignore_eos")
    stop = options.get("stop")
    if stop is not None:
        _extend(stopping, "stop", [stop] if isinstance(stop, str) else stop, "stop")
    time_limit_s = options.get("time_limit_s")
    if time_limit_s is not None:
        try:
            milliseconds = round(time_limit_s * 1000)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequest("time_limit_s", "must be a number of seconds") from None
        _set(stopping, "time_limit_ms", milliseconds, "time_limit_s")


def _set_received(request: pb.GenerateRequest | pb.ChatRequest, received: Sequence[int] | int | None) -> None:
    if isinstance(received, str | bytes | bytearray):
        raise InvalidRequest("resume_from", "must be token ids or their number")
    if isinstance(received, Sequence):
        _extend(request.received, "ids", received, "resume_from")
        received = len(received)
    _set(request, "resume_from_index", received, "resume_from")


def _add_messages(target: Any, messages: Sequence[AnyMessage]) -> None:
    if isinstance(messages, str | bytes | Mapping):
        raise InvalidRequest("messages", "must be a sequence of messages")
    for position, message in enumerate(messages):
        place = f"messages[{position}]"
        role, content = _role_and_content(message, place)
        added = target.add()
        _set(added, "role", role, f"{place}.role")
        _set(added, "content", content, f"{place}.content")


def _role_and_content(message: object, place: str) -> tuple[object, object]:
    if isinstance(message, Message):
        return message.role, message.content
    if isinstance(message, Mapping) and set(message) == {"role", "content"}:
        return message["role"], message["content"]
    raise InvalidRequest(place, "must be a Message, or a mapping with exactly 'role' and 'content'")


def _refuse_unknown(options: Mapping[str, Any], known: type[Any]) -> None:
    unknown = sorted(set(options) - set(known.__annotations__))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(known.__annotations__))}")


def _set(message: ProtoMessage, field: str, value: object, name: str) -> None:
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError):
        raise InvalidRequest(name, f"{_kind(value)} does not fit; {_expectation(message, field)}") from None


def _extend(message: ProtoMessage, field: str, values: Sequence[object], name: str) -> None:
    try:
        getattr(message, field).extend(values)
    except (TypeError, ValueError):
        raise InvalidRequest(name, f"not every item fits; {_expectation(message, field)}") from None


def _kind(value: object) -> str:
    return f"{value!r}" if isinstance(value, int | float) else f"a value of type {type(value).__name__}"


def _expectation(message: ProtoMessage, field: str) -> str:
    described = message.DESCRIPTOR.fields_by_name[field]
    kinds = {
        described.CPPTYPE_STRING: "text is expected",
        described.CPPTYPE_BOOL: "true or false is expected",
        described.CPPTYPE_DOUBLE: "a number is expected",
        described.CPPTYPE_INT32: "a whole number of at most 32 bits is expected",
        described.CPPTYPE_UINT32: "a whole number from 0 to 4294967295 is expected",
        described.CPPTYPE_INT64: "a whole number of at most 64 bits is expected",
    }
    return kinds[described.cpp_type]
