"""Requests to values, or refusals that name the field. Nothing is called, nothing is allocated."""

import re
from collections.abc import Sequence
from typing import Final

from corolla.chassis.errors import ContextLengthExceeded, InvalidRequest
from corolla.client.generation.answering import AnswerOptions
from corolla.client.generation.resumption import Resumption
from corolla.client.text import formats
from corolla.client.text.formats import AnswerFormat
from corolla.decoding.parameters import SamplingParams, SpeculationMode, SpeculationOptions
from corolla.decoding.speculation import MAX_DRAFT_TOKENS
from corolla.v1 import generation_pb2 as pb

MAX_COMPLETIONS: Final = 16
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_STOP_SEQUENCES: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_SALT_CHARS: Final = 256
MAX_TIME_LIMIT_MS: Final = 24 * 3600 * 1000

_SPECULATION_MODES: Final[dict[pb.SpeculationMode.ValueType, SpeculationMode | None]] = {
    pb.SPECULATION_MODE_UNSPECIFIED: None,
    pb.SPECULATION_MODE_OFF: SpeculationMode.OFF,
    pb.SPECULATION_MODE_PROMPT_LOOKUP: SpeculationMode.PROMPT_LOOKUP,
    pb.SPECULATION_MODE_DRAFT_MODEL: SpeculationMode.DRAFT_MODEL,
}


def num_completions(request: pb.GenerateRequest | pb.ChatRequest) -> int:
    """How many answers the request wants. Raises InvalidRequest."""
    number = request.num_completions if request.HasField("num_completions") else 1
    if not 1 <= number <= MAX_COMPLETIONS:
        raise InvalidRequest("num_completions", f"must be between 1 and {MAX_COMPLETIONS}")
    if request.session_id and number > 1:
        raise InvalidRequest("num_completions", "must be 1 in a session")
    if request.request_id and number > 1:
        raise InvalidRequest("num_completions", "must be 1 in a request with a name")
    return number


def check_turns(request: pb.ChatRequest, num_turns: int) -> None:
    """Raises InvalidRequest: the session is not at the turn that its caller expects."""
    if request.HasField("expected_turns") and request.expected_turns != num_turns:
        raise InvalidRequest("expected_turns", f"the conversation has gone on: it has had {num_turns} turns")


def prompt(request: pb.GenerateRequest, vocab_size: int, context_length: int) -> str | Sequence[int]:
    """Text or token ids. Raises InvalidRequest, ContextLengthExceeded."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        if not request.text:
            raise InvalidRequest("text", "must not be empty")
        return request.text
    if kind == "tokens":
        if len(request.tokens.ids) > context_length:
            raise ContextLengthExceeded("prompt", f"exceeds the model's context of {context_length} tokens")
        if not request.tokens.ids:
            raise InvalidRequest("tokens.ids", "must not be empty")
        return token_ids("tokens.ids", request.tokens.ids, vocab_size)
    raise InvalidRequest("prompt", "one of text and tokens must be set")


def token_ids(field: str, given: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids as they are. Raises InvalidRequest where one is none of the vocabulary."""
    checked = tuple(given)
    if checked and (largest := max(checked)) >= vocab_size:
        index = checked.index(largest)
        raise InvalidRequest(f"{field}[{index}]", f"must be less than the vocabulary's size, {vocab_size}")
    return checked


def response_format(given: pb.ResponseFormat) -> AnswerFormat | None:
    """What the answer must be; None where any text will do. Raises InvalidRequest."""
    kind = given.WhichOneof("format")
    field = f"response_format.{kind}"
    match kind:
        case "json_object":
            return formats.json_object(field)
        case "json_schema":
            return formats.json_schema(given.json_schema, field)
        case "regex":
            return formats.regex(given.regex, field)
        case "choice":
            return formats.choice(given.choice.texts, f"{field}.texts")
        case "lark":
            return formats.lark(given.lark, field)
        case _:
            return None


def _form(request: pb.GenerateRequest | pb.ChatRequest, violations: list[tuple[str, str]]) -> AnswerFormat | None:
    try:
        form = response_format(request.response_format)
    except InvalidRequest as error:
        violations += error.violations
        return None
    try:
        if form is not None:
            check_form_ends(request)
    except InvalidRequest as error:
        violations += error.violations
    return form


def check_form_ends(request: pb.GenerateRequest | pb.ChatRequest) -> None:
    """Raises InvalidRequest where an answer of a form is to go on behind its end."""
    if request.stopping.ignore_eos:
        raise InvalidRequest("stopping.ignore_eos", "an answer of a given format ends where that does")


def _resumption(request: pb.GenerateRequest | pb.ChatRequest, vocab_size: int) -> Resumption | None:
    received_ids = token_ids("received.ids", request.received.ids, vocab_size)
    if not request.request_id:
        if request.resume_from_index or received_ids:
            raise InvalidRequest("request_id", "must be the one with which the answer began")
        return None
    if not REQUEST_ID.fullmatch(request.request_id):
        raise InvalidRequest("request_id", "must be 1 to 64 letters, digits, dots, dashes or underscores")
    if received_ids and len(received_ids) != request.resume_from_index:
        raise InvalidRequest("received.ids", "must be as many as resume_from_index says, or none")
    return Resumption(request.request_id, request.resume_from_index, received_ids)


def answer_options(request: pb.GenerateRequest | pb.ChatRequest, vocab_size: int) -> AnswerOptions:
    """How an answer is to be made. Raises InvalidRequest with one violation per field that is out of range."""
    sampling, stopping, speculation = request.sampling, request.stopping, request.speculation
    violations: list[tuple[str, str]] = []
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    if max_tokens is not None and max_tokens < 1:
        violations.append(("stopping.max_tokens", "must be at least 1"))
    time_limit_ms = stopping.time_limit_ms if stopping.HasField("time_limit_ms") else None
    if time_limit_ms is not None and not 1 <= time_limit_ms <= MAX_TIME_LIMIT_MS:
        violations.append(("stopping.time_limit_ms", f"must be between 1 and {MAX_TIME_LIMIT_MS}"))
    if len(stopping.stop) > MAX_STOP_SEQUENCES:
        violations.append(("stopping.stop", f"at most {MAX_STOP_SEQUENCES} are accepted"))
    violations += [
        (f"stopping.stop[{index}]", f"must have 1 to {MAX_STOP_CHARS} characters")
        for index, sequence in enumerate(stopping.stop)
        if not 1 <= len(sequence) <= MAX_STOP_CHARS
    ]
    max_draft_tokens = speculation.max_draft_tokens if speculation.HasField("max_draft_tokens") else None
    if max_draft_tokens is not None and not 1 <= max_draft_tokens <= MAX_DRAFT_TOKENS:
        violations.append(("speculation.max_draft_tokens", f"must be between 1 and {MAX_DRAFT_TOKENS}"))
    if speculation.mode not in _SPECULATION_MODES:
        violations.append(("speculation.mode", "is none that this service knows"))
    if len(request.cache_salt) > MAX_SALT_CHARS:
        violations.append(("cache_salt", f"must have at most {MAX_SALT_CHARS} characters"))
    params = SamplingParams()
    try:
        params = _sampling(sampling, request.logprobs if request.HasField("logprobs") else None, vocab_size)
    except InvalidRequest as error:
        names = {"num_logprobs": "logprobs"}
        violations += [(names.get(field, f"sampling.{field}"), text) for field, text in error.violations]
    form = _form(request, violations)
    if violations:
        raise InvalidRequest(*violations[0], *violations[1:])
    return AnswerOptions(
        sampling=params,
        max_tokens=max_tokens,
        stop_sequences=tuple(stopping.stop),
        ignore_eos=stopping.ignore_eos,
        time_limit_s=None if time_limit_ms is None else time_limit_ms / 1000,
        speculation=SpeculationOptions(_SPECULATION_MODES[speculation.mode], max_draft_tokens),
        resumption=_resumption(request, vocab_size),
        form=form,
    )


def _sampling(given: pb.SamplingParameters, num_logprobs: int | None, vocab_size: int) -> SamplingParams:
    values = {descriptor.name: value for descriptor, value in given.ListFields()}
    if "temperature" not in values and values.keys() & {"top_k", "top_p", "min_p", "seed"}:
        values["temperature"] = 1.0
    values["logit_bias"] = tuple(sorted(given.logit_bias.items()))
    if max(given.logit_bias, default=0) >= vocab_size:
        raise InvalidRequest("logit_bias", f"must be for tokens below the vocabulary's size, {vocab_size}")
    return SamplingParams(**values, num_logprobs=num_logprobs)
