"""A message is read once: of a stranger's only the names, and nothing of anyone's behind its request."""

from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from corolla.chain.cache_salts import CacheSalts
from corolla.chassis.calls import UNCOUNTED
from corolla.chassis.errors import InvalidRequest, ScopeDenied
from corolla.chassis.tenant_limits import StandbyMode, TenantLimits
from corolla.client.adapters import ModelNames
from corolla.client.api.keys import NewKey, Scope
from corolla.client.api.requests import RequestParser
from corolla.client.api.servicer import CallBounds, GenerationServicer
from corolla.client.api.tenants import KeyHolder
from corolla.client.generation.admission import Caller
from corolla.client.generation.request import AnyRequest
from corolla.client.generation.resumption import Resumption
from corolla.client.output_parsing.deltas import Delta
from corolla.client.output_parsing.parser_choice import OutputFormat
from corolla.client.reply_sizes import ANY_ROOM
from corolla.decoding.stopping import FinishReason
from corolla.v1 import generation_pb2 as pb

NAMES = {"model", "adapter", "request_id"}
SALTS = CacheSalts("")
TOKENIZER: Any = SimpleNamespace(
    hf_tokenizer=SimpleNamespace(chat_template="", added_tokens_decoder={}), special_token_ids=frozenset()
)


def parser_for(model: pb.Model) -> RequestParser:
    return RequestParser(model, frozenset(), OutputFormat.from_tokenizer(TOKENIZER), SALTS)


class WatchedMessage:
    """A message that knows what is read of it, and may not be read any more once it is closed."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.was_read: set[str] = set()
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        assert not self.is_closed, f"{name} is read again"
        self.was_read.add(name)
        return getattr(self._message, name)


class ClosingAnswering:
    """Answers at once, when the message is closed."""

    def __init__(self, message: WatchedMessage) -> None:
        self._message = message
        self.requests: list[AnyRequest] = []

    async def answer(
        self, request: AnyRequest, next_prompt: Any, record_turn: Any = None
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        self._message.is_closed = True
        self.requests.append(request)
        for index in range(request.num_completions):
            yield index, Delta("Hi", finish_reason=FinishReason.EOS)


async def replies_to(method: str, message: WatchedMessage, scope: Scope) -> list[tuple[AnyRequest, Any]]:
    """What a caller with a key for one scope gets, with the request that was answered."""
    answering = ClosingAnswering(message)
    unused: Any = None
    parts: dict[str, Any] = {
        "quotas": SimpleNamespace(limits=lambda tenant: TenantLimits(answer_seconds=5)),
        "answering": answering,
        "chat": SimpleNamespace(reserved_names=frozenset()),
    }
    model = pb.Model(name="m", vocab_size=10, context_length=100)
    servicer = GenerationServicer(
        model, tokenizations=unused, transcripts=unused, sessions=unused, placement=unused,
        tokenizer=TOKENIZER, names=ModelNames(["m"], unused), requests=parser_for(model),
        bounds=CallBounds(farewell_s=0.2, max_reply_bytes=1 << 20), **parts,
    )  # fmt: skip
    call: Any = SimpleNamespace(
        caller=KeyHolder("acme", NewKey("acme", scopes=[scope]).record),
        context=SimpleNamespace(time_remaining=lambda: None, invocation_metadata=lambda: ()),
        describe=lambda facts: None,
        name_ignored=lambda places: None,
        held=UNCOUNTED,
        note=b"",
    )
    answer = getattr(servicer, method)(message, call)
    replies = [each async for each in answer] if method.endswith("Stream") else [await answer]
    return [(answering.requests[0], reply) for reply in replies]


def text(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="the thin man", model="m:fine", **fields)


def chat(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hi")], model="m:fine", **fields)


METHODS = [("Generate", text), ("GenerateStream", text), ("Chat", chat), ("ChatStream", chat)]


@pytest.mark.parametrize("method, make", METHODS)
async def test_nothing_but_names_is_read_of_whoever_may_not_ask(method: str, make: Callable[..., Any]) -> None:
    message = WatchedMessage(make(num_completions=99))
    with pytest.raises(ScopeDenied):
        await replies_to(method, message, Scope.TOKENIZE)
    assert message.was_read <= NAMES


@pytest.mark.parametrize("fields", [{"num_completions": 2}, {"session_id": "0" * 32, "request_id": "a"}])
@pytest.mark.parametrize("method, make", METHODS)
async def test_the_message_is_not_read_behind_its_request(
    method: str, make: Callable[..., Any], fields: dict[str, Any]
) -> None:
    scope = Scope.CHAT if method.startswith("Chat") else Scope.GENERATE
    replies = await replies_to(method, WatchedMessage(make(**fields)), scope)
    request = replies[0][0]
    num_completions = fields.get("num_completions", 1)
    assert (request.session_id, request.num_completions) == (fields.get("session_id", ""), num_completions)
    assert request.caller.is_streamed is method.endswith("Stream")
    assert request.num_bytes == make(**fields).ByteSize()
    assert request.adapter == "fine"
    if method.endswith("Stream"):
        assert [reply.HasField("usage") for _, reply in replies] == [False] * (num_completions - 1) + [True]
    else:
        assert replies[0][1].model == "m:fine"


def parsed(message: Any, answer_seconds: float | None = None, standby: StandbyMode | None = None) -> AnyRequest:
    parser = parser_for(pb.Model(vocab_size=10, context_length=100, hidden_size=16))
    parse: Any = parser.chat if isinstance(message, pb.ChatRequest) else parser.text
    request: AnyRequest = parse(
        message, Caller("acme", answer_seconds=answer_seconds, standby=standby), "fine", ANY_ROOM
    )
    return request


@pytest.mark.parametrize(
    "wanted_ms, answer_seconds, limit_s",
    [(None, None, None), (2000, None, 2), (None, 5.0, 5), (2000, 5.0, 2), (9000, 5.0, 5)],
)
def test_an_answer_may_take_what_its_caller_wants_and_its_tenant_may(
    wanted_ms: int | None, answer_seconds: float | None, limit_s: float | None
) -> None:
    assert parsed(text(stopping={"time_limit_ms": wanted_ms}), answer_seconds).time_limit_s == limit_s


@pytest.mark.parametrize("make", [text, chat])
@pytest.mark.parametrize(
    "asked, of_tenant, mode",
    [
        (pb.STANDBY_MODE_UNSPECIFIED, None, "auto"),
        (pb.STANDBY_MODE_UNSPECIFIED, "all", "all"),
        (pb.STANDBY_MODE_OFF, None, "off"),
        (pb.STANDBY_MODE_AUTO, "all", "auto"),
        (pb.STANDBY_MODE_ALL, None, "auto"),
        (pb.STANDBY_MODE_ALL, "off", "off"),
    ],
)
def test_an_answer_has_no_more_standbys_than_its_caller_wants_and_its_tenant_has(
    make: Callable[..., Any], asked: pb.StandbyMode.ValueType, of_tenant: StandbyMode | None, mode: StandbyMode
) -> None:
    assert parsed(make(standby=asked), standby=of_tenant).standby == mode


@pytest.mark.parametrize("make, operation", [(text, "text_completion"), (chat, "chat")])
def test_a_request_has_what_its_message_says(make: Callable[..., Any], operation: str) -> None:
    request = parsed(make(request_id="a", resume_from_index=1, received={"ids": [7]}, cache_salt="s"))
    assert request.operation == operation
    assert request.resumption == Resumption("a", 1, (7,))
    assert request.turn_name == Resumption("a").turn_name("acme")
    assert parsed(make()).turn_name == ""
    assert request.cache_salt == SALTS.of("acme", "s")


def test_all_fields_that_are_wrong_are_named_at_once() -> None:
    message = text(
        stopping={"max_tokens": 0, "time_limit_ms": 0, "stop": [""]}, speculation={"max_draft_tokens": 65},
        cache_salt="s" * 257, standby=9, sampling={"top_p": 2.0}, logprobs=99, response_format={"regex": ""},
    )  # fmt: skip
    with pytest.raises(InvalidRequest) as refusal:
        parsed(message)
    assert [field for field, _ in refusal.value.violations] == [
        "stopping.max_tokens", "stopping.time_limit_ms", "stopping.stop[0]", "speculation.max_draft_tokens",
        "standby", "cache_salt", "sampling.top_p", "logprobs", "response_format.regex",
    ]  # fmt: skip
