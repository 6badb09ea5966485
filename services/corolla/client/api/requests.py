"""Converts messages of the public API to requests, or refuses them with an error that names the fields."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from corolla.chain.cache_salts import CacheSalts
from corolla.chain.prompt_readout import Pooling, PromptReadout
from corolla.chassis.errors import ContextLengthExceeded, InvalidRequest, context_exceeded
from corolla.chassis.tenant_limits import STANDBY_MODES, StandbyMode
from corolla.client.api import conversations
from corolla.client.generation.admission import Caller
from corolla.client.generation.request import AnswerRequest, MakeReadout
from corolla.client.generation.resumption import Resumption
from corolla.client.output_parsing.call_rules import FORM, arguments_parts
from corolla.client.output_parsing.parser_choice import OutputFormat, OutputParsing
from corolla.client.reply_sizes import ReplyRoom
from corolla.client.text import formats
from corolla.client.text.conversation import ChatSetting, check_conversation, texts_of
from corolla.client.text.formats import AnswerFormat
from corolla.decoding.parameters import MAX_LOGPROBS, SamplingParams
from corolla.decoding.speculation import MAX_DRAFT_TOKENS
from corolla.v1 import generation_pb2 as pb
from corolla.v1.common_pb2 import ChatMessage

MAX_COMPLETIONS: Final = 16
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_STOP_SEQUENCES: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_SALT_CHARS: Final = 256
MAX_TIME_LIMIT_MS: Final = 24 * 3600 * 1000

_STANDBY_MODES: Final[dict[pb.StandbyMode.ValueType, StandbyMode]] = {
    pb.STANDBY_MODE_OFF: "off",
    pb.STANDBY_MODE_AUTO: "auto",
    pb.STANDBY_MODE_ALL: "all",
}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to answer, or a session's new messages.

    Attributes:
        instructions: a system message for this answer only; empty: none.
        expected_turns: the number of turns that the session must have had; None: any number.
    """

    messages: Sequence[ChatMessage]
    setting: ChatSetting
    instructions: str = ""
    expected_turns: int | None = None

    def check_turns(self, num_turns: int) -> None:
        """Raises InvalidRequest if the session does not have as many turns as its caller expects."""
        if self.expected_turns not in (None, num_turns):
            raise InvalidRequest("expected_turns", f"the conversation has gone on: it has had {num_turns} turns")


@dataclass(slots=True)
class ContinuationPrompt:
    """A text or token ids, and the continuation that is scored, in the same form.

    Attributes:
        first_scored: the number of tokens before the continuation, once `encoded` has counted them.
    """

    prompt: str | Sequence[int]
    continuation: str | Sequence[int]
    first_scored: int = 0

    def encoded(self, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
        """All token ids. A text is divided where the tokens of its prompt alone end."""
        if isinstance(self.prompt, str) and isinstance(self.continuation, str):
            self.first_scored = len(encode(self.prompt))
            return encode(self.prompt + self.continuation)
        self.first_scored = len(self.prompt)
        return [*self.prompt, *self.continuation]


AnyMessage = pb.GenerateRequest | pb.ChatRequest
TextRequest = AnswerRequest[str | Sequence[int]]
ScoreRequest = AnswerRequest[ContinuationPrompt]
ChatRequest = AnswerRequest[ChatPrompt]
_Prompt = TypeVar("_Prompt")


@dataclass(frozen=True, slots=True)
class RequestParser:
    """Parses each message into a request, which all later code uses instead of the message.

    Attributes:
        reserved_names: the names of template arguments that callers must not set.
        standby: which answers have standbys, if the caller's tenant has no mode of its own.
    """

    model: pb.Model
    reserved_names: frozenset[str]
    output_format: OutputFormat
    cache_salts: CacheSalts
    standby: StandbyMode = "auto"

    def text(self, message: pb.GenerateRequest, caller: Caller, adapter: str, reply: ReplyRoom) -> TextRequest:
        """Parses a prompt and the options of its answer. Raises InvalidRequest, ContextLengthExceeded."""
        return self._request(message, caller, adapter, reply, self._text_prompt(message), None)

    def score(self, message: pb.ScoreRequest, caller: Caller, adapter: str, reply: ReplyRoom) -> ScoreRequest:
        """Parses a continuation and the text before it. Raises InvalidRequest, ContextLengthExceeded."""
        num_logprobs = _given(message, "logprobs") or 0
        if not 0 <= num_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest("logprobs", f"must be between 0 and {MAX_LOGPROBS}")
        continuation = self._input(
            message.WhichOneof("continuation"), message.continuation_text, message.continuation_tokens.ids
        )
        prompt: str | Sequence[int] = "" if isinstance(continuation, str) else ()
        if message.text or message.tokens.ids:
            prompt = self._input(message.WhichOneof("prompt"), message.text, message.tokens.ids)
        if isinstance(prompt, str) != isinstance(continuation, str):
            raise InvalidRequest(
                "continuation", "must be a text where the prompt is one, and token ids where it is ids"
            )
        pair = ContinuationPrompt(prompt, continuation)
        # The most probable token says whether a greedy answer would choose the same.
        request = self._reading(
            message, caller, adapter, pair, lambda ids: PromptReadout.scores(ids, pair.first_scored, num_logprobs or 1)
        )
        return replace(request, reply=reply, echoed_from=lambda: pair.first_scored, reply_logprobs=num_logprobs)

    def embedding(self, message: pb.EmbedRequest, caller: Caller, adapter: str) -> TextRequest:
        """Parses a text to embed. Raises InvalidRequest, ContextLengthExceeded."""
        poolings = {
            pb.EmbedRequest.POOLING_MEAN: Pooling.POOLING_SUM,
            pb.EmbedRequest.POOLING_LAST: Pooling.POOLING_LAST,
        }
        if message.pooling not in poolings:
            raise InvalidRequest("pooling", "is unknown to this service")
        if message.HasField("dimensions") and not 1 <= message.dimensions <= self.model.hidden_size:
            raise InvalidRequest("dimensions", f"must be between 1 and {self.model.hidden_size}")
        text = self._input(message.WhichOneof("input"), message.text, message.tokens.ids)
        pooling = poolings[message.pooling]
        return self._reading(message, caller, adapter, text, lambda ids: PromptReadout(ids, pooling=pooling))

    def _input(self, kind: str | None, text: str, ids: Sequence[int]) -> str | Sequence[int]:
        """A text or token ids, whichever is set, by the name of the field."""
        if kind is None:
            raise InvalidRequest("input", "a text or token ids must be set")
        if not (text or ids):
            raise InvalidRequest(kind, "must not be empty")
        if text:
            return text
        if len(ids) > self.model.context_length:
            raise context_exceeded(self.model.context_length, len(ids))
        return token_ids(f"{kind}.ids", ids, self.model.vocab_size)

    def _reading(
        self,
        message: pb.ScoreRequest | pb.EmbedRequest,
        caller: Caller,
        adapter: str,
        prompt: _Prompt,
        readout: MakeReadout,
    ) -> AnswerRequest[_Prompt]:
        """A request without an answer."""
        if len(message.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequest("cache_salt", f"must have at most {MAX_SALT_CHARS} characters")
        return AnswerRequest(
            caller=caller,
            prompt=prompt,
            num_bytes=message.ByteSize(),
            operation="embeddings" if isinstance(message, pb.EmbedRequest) else "text_completion",
            adapter=adapter,
            sampling=SamplingParams(),
            max_tokens=0,
            ignore_eos=True,
            cache_salt=self.cache_salts.of(caller.tenant, message.cache_salt),
            standby=caller.standby or self.standby,
            readout=readout,
        )

    def chat(self, message: pb.ChatRequest, caller: Caller, adapter: str, reply: ReplyRoom) -> ChatRequest:
        """Parses messages and the options of their answer. Raises InvalidRequest."""
        messages = message.messages
        conversations.check_messages(messages)
        setting = conversations.setting(message, self.reserved_names)
        rules = conversations.call_rules(message, setting.tools)
        begun = "".join(texts_of(messages[-1]) if messages else ()) if setting.continues_last else None
        expected_turns = _given(message, "expected_turns") if message.session_id else None
        prompt = ChatPrompt(messages, setting, message.instructions, expected_turns)
        parsing = OutputParsing(self.output_format, rules, begun)
        request = self._request(message, caller, adapter, reply, prompt, parsing)
        if not request.session_id:
            check_conversation(messages, setting)
        return request

    def _text_prompt(self, message: pb.GenerateRequest) -> str | Sequence[int]:
        kind = message.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequest("prompt", "one of text and tokens must be set")
        if kind == "text":
            return message.text
        if not message.tokens.ids:
            raise InvalidRequest("tokens.ids", "must not be empty")
        if len(message.tokens.ids) > self.model.context_length:
            raise context_exceeded(self.model.context_length, len(message.tokens.ids))
        return token_ids("tokens.ids", message.tokens.ids, self.model.vocab_size)

    def _request(
        self,
        message: AnyMessage,
        caller: Caller,
        adapter: str,
        reply: ReplyRoom,
        prompt: _Prompt,
        output_parsing: OutputParsing | None,
    ) -> AnswerRequest[_Prompt]:
        """Parses the common fields. Raises InvalidRequest with one violation per field that is out of range."""
        num_completions = _num_completions(message)
        echoes = isinstance(message, pb.GenerateRequest) and message.echo
        stopping, speculation = message.stopping, message.speculation
        max_tokens = _given(stopping, "max_tokens")
        time_limit_ms = _given(stopping, "time_limit_ms")
        max_draft_tokens = _given(speculation, "max_draft_tokens")
        in_range = {
            "stopping.max_tokens": (max_tokens is None or max_tokens >= (not echoes), f"must be at least {1 - echoes}"),
            "echo": (
                not (echoes and (message.session_id or message.request_id)),
                "must be false in a session, or in a request with a name",
            ),
            "stopping.time_limit_ms": _up_to(MAX_TIME_LIMIT_MS, time_limit_ms),
            "stopping.stop": (len(stopping.stop) <= MAX_STOP_SEQUENCES, f"at most {MAX_STOP_SEQUENCES} are accepted"),
            **{
                f"stopping.stop[{index}]": (False, f"must have 1 to {MAX_STOP_CHARS} characters")
                for index, sequence in enumerate(stopping.stop[:MAX_STOP_SEQUENCES])
                if not 1 <= len(sequence) <= MAX_STOP_CHARS
            },
            "speculation.max_draft_tokens": _up_to(MAX_DRAFT_TOKENS, max_draft_tokens),
            "speculation.mode": (speculation.mode in pb.SpeculationMode.values(), "is unknown to this service"),
            "standby": (message.standby in pb.StandbyMode.values(), "is unknown to this service"),
            "cache_salt": (len(message.cache_salt) <= MAX_SALT_CHARS, f"must have at most {MAX_SALT_CHARS} characters"),
        }
        violations = [(field, problem) for field, (is_allowed, problem) in in_range.items() if not is_allowed]
        sampling, form = SamplingParams(), None
        try:
            sampling = SamplingParams.read(message.sampling, self.model.vocab_size, _given(message, "logprobs"))
        except InvalidRequest as error:
            names = {"num_logprobs": "logprobs"}
            violations += [(names.get(field, f"sampling.{field}"), text) for field, text in error.violations]
        try:
            form = _form(message, output_parsing)
        except InvalidRequest as error:
            violations += error.violations
        if violations:
            raise InvalidRequest(*violations[0], *violations[1:])
        time_limits_s = [None if time_limit_ms is None else time_limit_ms / 1000, caller.answer_seconds]
        return AnswerRequest(
            caller=caller,
            prompt=prompt,
            num_bytes=message.ByteSize(),
            operation="text_completion" if output_parsing is None else "chat",
            session_id=message.session_id,
            adapter=adapter,
            num_completions=num_completions,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_sequences=tuple(stopping.stop),
            ignore_eos=stopping.ignore_eos,
            reply=reply,
            echoed_from=(lambda: 0) if echoes else None,
            reply_logprobs=sampling.num_logprobs,
            time_limit_s=min((limit_s for limit_s in time_limits_s if limit_s is not None), default=None),
            speculation=speculation,
            resumption=_resumption(message, self.model.vocab_size, self.model.context_length),
            cache_salt=self.cache_salts.of(caller.tenant, message.cache_salt),
            standby=_standby(message, caller.standby or self.standby),
            output_parsing=output_parsing,
            form=form,
            readout=_echo(sampling.num_logprobs) if echoes else None,
        )


def _standby(message: AnyMessage, most: StandbyMode) -> StandbyMode:
    """Which answers have standbys: the request may ask for fewer than the tenant has, and not for more."""
    asked = _STANDBY_MODES.get(message.standby, most)
    return min(asked, most, key=STANDBY_MODES.index)


def _echo(num_logprobs: int | None) -> MakeReadout:
    """The readout of a prompt that is echoed: with the log probabilities of its tokens if the caller wants some."""
    if num_logprobs is None:
        return PromptReadout
    return lambda ids: PromptReadout.scores(ids, 1, num_logprobs)


def token_ids(field: str, given: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The token ids, unchanged. Raises InvalidRequest if an id is not in the vocabulary."""
    checked = tuple(given)
    if checked and (largest := max(checked)) >= vocab_size:
        index = checked.index(largest)
        raise InvalidRequest(f"{field}[{index}]", f"must be less than the vocabulary's size, {vocab_size}")
    return checked


def _given(message: Any, field: str) -> int | None:
    """An optional number; None if it is not set."""
    number: int | None = getattr(message, field) if message.HasField(field) else None
    return number


def _up_to(most: int, number: int | None) -> tuple[bool, str]:
    return number is None or 1 <= number <= most, f"must be between 1 and {most}"


def _num_completions(message: AnyMessage) -> int:
    number = message.num_completions if message.HasField("num_completions") else 1
    if not 1 <= number <= MAX_COMPLETIONS:
        raise InvalidRequest("num_completions", f"must be between 1 and {MAX_COMPLETIONS}")
    if message.session_id and number > 1:
        raise InvalidRequest("num_completions", "must be 1 in a session")
    if message.request_id and number > 1:
        raise InvalidRequest("num_completions", "must be 1 in a request with a name")
    return number


def _form(message: AnyMessage, output_parsing: OutputParsing | None) -> AnswerFormat | None:
    """The form that an answer must have; None allows any text.

    Calls of tools take precedence over the form that the caller asks for, which only the text of an answer must have.
    """
    form = _response_format(message.response_format)
    if output_parsing is not None:
        form = _form_of_calls(output_parsing, form) or form
    if form is not None and message.stopping.ignore_eos:
        raise InvalidRequest(
            "stopping.ignore_eos", "must be false with a response format, whose end is the answer's end"
        )
    return form


def _form_of_calls(output_parsing: OutputParsing, form: AnswerFormat | None) -> AnswerFormat | None:
    """The form of an answer that calls tools, or has the given form if it may; None if calls need no grammar."""
    rules = output_parsing.rules
    calls = output_parsing.format.grammar(rules)
    if calls is None:
        return None
    return formats.calls_or(calls, arguments_parts(rules), None if rules.is_required else form, FORM, "tools")


def _response_format(given: pb.ResponseFormat) -> AnswerFormat | None:
    kind = given.WhichOneof("format")
    field = f"response_format.{kind}"
    match kind:
        case "json_object":
            return formats.json_object(field)
        case "json_schema":
            return formats.json_schema(given.json_schema, field, is_strict=given.strict)
        case "regex":
            return formats.regex(given.regex, field)
        case "choice":
            return formats.choice(given.choice.texts, f"{field}.texts")
        case "lark":
            return formats.lark(given.lark, field)
        case _:
            return None


def _resumption(message: AnyMessage, vocab_size: int, context_length: int) -> Resumption:
    if not message.request_id:
        if message.resume_from_index or message.received.ids:
            raise InvalidRequest("request_id", "must be the one with which the answer began")
        return Resumption()
    if not REQUEST_ID.fullmatch(message.request_id):
        raise InvalidRequest("request_id", "must be 1 to 64 letters, digits, dots, dashes or underscores")
    if message.received.ids and len(message.received.ids) != message.resume_from_index:
        raise InvalidRequest("received.ids", "must be as many as resume_from_index says, or none")
    if len(message.received.ids) > context_length:
        raise ContextLengthExceeded("received.ids", "must not be more than the model's context")
    received_ids = token_ids("received.ids", message.received.ids, vocab_size)
    return Resumption(message.request_id, message.resume_from_index, received_ids)
