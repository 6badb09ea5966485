"""What bad input gets: one row each, with the exact status and details, before any hop is called.

That a prompt is both text and token ids cannot be said: the two are a oneof, in which the later one wins.
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from corolla.block_server.engine import Engine
from corolla.block_server.sessions import SessionTable
from corolla.chassis.channels import open_channel
from corolla.v1 import generation_pb2 as pb
from corolla.v1.generation_pb2_grpc import GenerationServiceStub
from tests.checkpoints import CONTEXT_LENGTH, VOCAB_SIZE, make_tiny_checkpoint
from tests.integration.refusals import Refusal, key_metadata, refusal
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
MAX_REQUEST_BYTES = 64 << 10
MINE, OTHERS = "key-of-mine-0001", "key-of-others-01"

A_CALL = pb.ToolCall(id="c", name="f", arguments="{}")
A_TOOL, REQUIRED = pb.Tool(name="f"), pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)
CONTINUED, ARGUMENTS = "continue_last_message", "template_arguments"

GENERATE = ("Generate", "GenerateStream")
CHAT = ("Chat", "ChatStream")


@dataclass(frozen=True)
class Sessions:
    """Ids that rows need: what holds which kind of session, for the tenant with the key `MINE`."""

    fresh: str
    of_text: str
    of_chat: str
    foreign: str
    expired: str
    deleted: str


@dataclass(frozen=True)
class Row:
    """One kind of bad input, the methods that it is tried on, and what each must answer."""

    name: str
    methods: tuple[str, ...]
    request: Callable[[Sessions], Message | bytes]
    code: grpc.StatusCode
    reason: str
    fields: tuple[str, ...] = ()
    resource: str = ""
    api_key: str | None = MINE


def prompt(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": "the thin man", **fields})


def chat(*messages: tuple[str, str], **fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(messages=[pb.ChatMessage(role=role, content=text) for role, text in messages], **fields)


def chat_of(request: dict[str, Any] | None = None, **fields: Any) -> pb.ChatRequest:
    """A chat of one message."""
    return pb.ChatRequest(messages=[pb.ChatMessage(**{"role": "user", **fields})], **(request or {}))


def with_arguments(arguments: dict[str, Any]) -> pb.ChatRequest:
    request = chat(("user", "hi"))
    request.template_arguments.update(arguments)
    return request


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


def with_tools(*tools: pb.Tool, **fields: Any) -> pb.ChatRequest:
    return chat(("user", "hi"), tools=tools, **fields)


def invalid(name: str, methods: tuple[str, ...], request: Message | Callable[[Sessions], Message], *fields: str) -> Row:
    build = (lambda _: request) if isinstance(request, Message) else request
    return Row(name, methods, build, INVALID, "INVALID_REQUEST", fields)


def bad_sampling(name: str, value: float) -> list[Row]:
    sampling = pb.SamplingParameters(**{name: value})  # type: ignore[arg-type]
    return [
        invalid(f"{name}={value}", GENERATE, prompt(sampling=sampling), f"sampling.{name}"),
        invalid(f"{name}={value}", CHAT, chat(("user", "hi"), sampling=sampling), f"sampling.{name}"),
    ]


def bad_stopping(name: str, field: str, **values: Any) -> list[Row]:
    stopping = pb.StoppingParameters(**values)
    return [
        invalid(name, GENERATE, prompt(stopping=stopping), f"stopping.{field}"),
        invalid(name, CHAT, chat(("user", "hi"), stopping=stopping), f"stopping.{field}"),
    ]


def unknown_session(name: str, session_id: Callable[[Sessions], str]) -> list[Row]:
    facts: tuple[Any, ...] = (NOT_FOUND, "SESSION_NOT_FOUND", (), "session")
    return [
        Row(name, GENERATE, lambda held: prompt(session_id=session_id(held)), *facts),
        Row(name, CHAT, lambda held: chat(("user", "hi"), session_id=session_id(held)), *facts),
        Row(name, ("GetSession",), lambda held: pb.GetSessionRequest(session_id=session_id(held)), *facts),
        Row(name, ("DeleteSession",), lambda held: pb.DeleteSessionRequest(session_id=session_id(held)), *facts),
    ]


def too_long(name: str, methods: tuple[str, ...], request: Message, field: str) -> Row:
    return Row(name, methods, lambda _: request, INVALID, "CONTEXT_LENGTH_EXCEEDED", (field,))


def malformed(name: str, methods: tuple[str, ...], data: bytes) -> Row:
    return Row(name, methods, lambda _: data, INVALID, "MALFORMED_MESSAGE", ("request",))


def unknown_model(methods: tuple[str, ...], request: Message) -> Row:
    return Row("unknown model", methods, lambda _: request, NOT_FOUND, "MODEL_NOT_FOUND", (), "model")


def refused_key(name: str, api_key: str | None) -> list[Row]:
    facts: tuple[Any, ...] = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", (), "", api_key)
    requests: dict[str, Message] = {
        "Generate": prompt(), "GenerateStream": prompt(), "Chat": chat(("user", "hi")),
        "ChatStream": chat(("user", "hi")), "CreateSession": pb.CreateSessionRequest(),
        "GetSession": pb.GetSessionRequest(session_id="0" * 32),
        "DeleteSession": pb.DeleteSessionRequest(session_id="0" * 32), "Tokenize": pb.TokenizeRequest(text="hi"),
        "Detokenize": pb.DetokenizeRequest(token_ids=[1]), "ListModels": pb.ListModelsRequest(),
        "GetModel": pb.GetModelRequest(),
    }  # fmt: skip
    return [Row(name, (method,), lambda _, request=request: request, *facts) for method, request in requests.items()]  # type: ignore[misc]


NAN, INF = math.nan, math.inf
INVALID_UTF8 = b"\x12\x02\xff\xfe"  # field 2 of GenerateRequest and Tokenize, a string, with bytes that UTF-8 never has
CONTEXT_FILLING = pb.TokenIds(ids=[40] * CONTEXT_LENGTH)

ROWS: list[Row] = [
    invalid(
        "detokenized id outside the vocabulary",
        ("Detokenize",),
        pb.DetokenizeRequest(token_ids=[5, VOCAB_SIZE]),
        "token_ids[1]",
    ),
    # The prompt.
    invalid("empty text in a session", GENERATE, lambda held: prompt(text="", session_id=held.of_text), "text"),
    invalid("no ids", GENERATE, pb.GenerateRequest(tokens=pb.TokenIds()), "tokens.ids"),
    invalid("neither text nor ids", GENERATE, pb.GenerateRequest(), "prompt"),
    invalid("nothing to tokenize", ("Tokenize",), pb.TokenizeRequest(), "input"),
    invalid(
        "id outside the vocabulary",
        GENERATE,
        pb.GenerateRequest(tokens=pb.TokenIds(ids=[5, VOCAB_SIZE])),
        "tokens.ids[1]",
    ),
    invalid("id of 32 bits", GENERATE, pb.GenerateRequest(tokens=pb.TokenIds(ids=[2**32 - 1])), "tokens.ids[0]"),
    # The context.
    too_long("prompt as long as the context", GENERATE, pb.GenerateRequest(tokens=CONTEXT_FILLING), "prompt"),
    too_long("chat longer than the context", CHAT, chat(("user", "x" * CONTEXT_LENGTH)), "prompt"),
    # Sampling.
    *(
        row
        for name, values in {
            "temperature": (-0.1, 100.1, 1e-9, NAN, INF, -INF),
            "top_k": (-1,),
            "top_p": (0.0, 1.01, -1.0, NAN, INF),
            "min_p": (-0.01, 1.01, NAN, INF),
            "repetition_penalty": (0.0, -1.0, 101.0, NAN, INF),
            "presence_penalty": (2.1, -2.1, NAN, INF),
            "frequency_penalty": (2.1, -2.1, NAN, -INF),
        }.items()
        for value in values
        for row in bad_sampling(name, value)
    ),
    invalid(
        "several at once",
        GENERATE,
        prompt(
            sampling=pb.SamplingParameters(temperature=NAN, top_p=2.0), stopping=pb.StoppingParameters(max_tokens=0)
        ),
        "stopping.max_tokens",
        "sampling.temperature",
        "sampling.top_p",
    ),
    # Stopping.
    *bad_stopping("max_tokens 0", "max_tokens", max_tokens=0),
    *bad_stopping("max_tokens negative", "max_tokens", max_tokens=-1),
    *bad_stopping("too many stop sequences", "stop", stop=["x"] * 17),
    *bad_stopping("empty stop sequence", "stop[1]", stop=["x", ""]),
    *bad_stopping("stop sequence too long", "stop[0]", stop=["x" * 257]),
    *bad_stopping("time limit 0", "time_limit_ms", time_limit_ms=0),
    *bad_stopping("time limit negative", "time_limit_ms", time_limit_ms=-5),
    *bad_stopping("time limit of years", "time_limit_ms", time_limit_ms=2**62),
    # Completions and log-probabilities.
    invalid("n=0", GENERATE, prompt(num_completions=0), "num_completions"),
    invalid("n negative", GENERATE, prompt(num_completions=-3), "num_completions"),
    invalid("n=17", GENERATE, prompt(num_completions=17), "num_completions"),
    invalid(
        "n in a session", GENERATE, lambda held: prompt(num_completions=2, session_id=held.fresh), "num_completions"
    ),
    invalid("logprobs=-1", GENERATE, prompt(logprobs=-1), "logprobs"),
    invalid("logprobs=21", GENERATE, prompt(logprobs=21), "logprobs"),
    invalid("logprobs=21", CHAT, chat(("user", "hi"), logprobs=21), "logprobs"),
    # The model.
    unknown_model(GENERATE, prompt(model="another")),
    unknown_model(CHAT, chat(("user", "hi"), model="another")),
    unknown_model(("CreateSession",), pb.CreateSessionRequest(model="another")),
    unknown_model(("Tokenize",), pb.TokenizeRequest(model="another", text="hi")),
    unknown_model(("GetModel",), pb.GetModelRequest(model="another")),
    unknown_model(("GetModel",), pb.GetModelRequest()),
    # Sessions.
    *unknown_session("unknown session", lambda _: "ab" * 16),
    *unknown_session("malformed session", lambda _: "not a session"),
    *unknown_session("session in capitals", lambda held: held.fresh.upper() + "A"),
    *unknown_session("expired session", lambda held: held.expired),
    *unknown_session("deleted session", lambda held: held.deleted),
    *unknown_session("foreign session", lambda held: held.foreign),
    *(
        Row("no session", (method,), lambda _, request=request: request, NOT_FOUND, "SESSION_NOT_FOUND", (), "session")  # type: ignore[misc]
        for method, request in (("GetSession", pb.GetSessionRequest()), ("DeleteSession", pb.DeleteSessionRequest()))
    ),
    invalid("Generate in a conversation", GENERATE, lambda held: prompt(session_id=held.of_chat), "session_id"),
    invalid(
        "Chat in a session of text", CHAT, lambda held: chat(("user", "hi"), session_id=held.of_text), "session_id"
    ),
    # Conversations.
    invalid("no messages", CHAT, chat(), "messages"),
    invalid("no messages in a session", CHAT, lambda held: chat(session_id=held.of_chat), "messages"),
    invalid("unknown role", CHAT, chat(("robot", "hi")), "messages[0].role"),
    invalid("no role", CHAT, chat(("", "hi")), "messages[0].role"),
    invalid(
        "unknown role in a session",
        CHAT,
        lambda held: chat(("user", "b"), ("robot", "c"), session_id=held.of_chat),
        "messages[1].role",
    ),
    invalid(
        "unknown role to tokenize",
        ("Tokenize",),
        pb.TokenizeRequest(chat=pb.Conversation(messages=[pb.ChatMessage(role="robot", content="a")])),
        "messages[0].role",
    ),
    invalid("text and parts", CHAT, chat_of(content="a", content_parts=["b"]), "messages[0].content_parts"),
    invalid("a user who calls", CHAT, chat_of(content="a", tool_calls=[A_CALL]), "messages[0].tool_calls"),
    invalid("a user who reasons", CHAT, chat_of(content="a", reasoning="b"), "messages[0].reasoning"),
    invalid("a user who answers a call", CHAT, chat_of(content="a", tool_call_id="b"), "messages[0].tool_call_id"),
    invalid("a long name", CHAT, chat_of(content="a", name="b" * 257), "messages[0].name"),
    *(
        invalid(
            f"arguments {arguments[:12]!r}",
            CHAT,
            chat_of(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments=arguments)]),
            "messages[0].tool_calls[0].arguments",
        )
        for arguments in ('{"a":' * 40 + "1" + "}" * 40, '{"a":' * 40 + "1")
    ),
    invalid("2,049 parts", CHAT, chat_of(content_parts=["a"] * 2048), "messages"),
    invalid("continuing a user's message", CHAT, chat(("user", "a"), continue_last_message=True), CONTINUED),
    invalid(
        "continuing a call",
        CHAT,
        chat_of(role="assistant", tool_calls=[A_CALL], request={"continue_last_message": True}),
        CONTINUED,
    ),
    invalid(
        "continuing an empty session",
        CHAT,
        lambda held: chat(session_id=held.fresh, continue_last_message=True),
        "messages",
    ),
    invalid("n=17", CHAT, chat(("user", "hi"), num_completions=17), "num_completions"),
    invalid("n=0", CHAT, chat(("user", "hi"), num_completions=0), "num_completions"),
    invalid("n and a name", CHAT, chat(("user", "hi"), num_completions=2, request_id="a"), "num_completions"),
    invalid(
        "n in a session",
        CHAT,
        lambda held: chat(("user", "hi"), num_completions=2, session_id=held.fresh),
        "num_completions",
    ),
    # Template arguments and tools.
    *(
        invalid(f"template argument {name}", CHAT, with_arguments({name: 1}), f"template_arguments.{name}")
        for name in ("messages", "tools", "add_generation_prompt", "raise_exception", "bos_token", "eos_token")
    ),
    *(
        invalid(f"template argument {name[:12]!r}", CHAT, with_arguments({name: 1}), "template_arguments")
        for name in ("", "a b", "_a", "<|end|>", "a" * 20_000)
    ),
    invalid("33 template arguments", CHAT, with_arguments(dict.fromkeys(map("a{}".format, range(33)), 1)), ARGUMENTS),
    invalid("an infinite argument", CHAT, with_arguments({"a": INF}), "template_arguments.a"),
    invalid("a deep argument", CHAT, with_arguments({"a": nested(9)}), "template_arguments.a"),
    invalid("129 tools", CHAT, with_tools(*(pb.Tool(name=f"f{i}") for i in range(129))), "tools"),
    *(
        invalid(f"tool {name[:8]!r}", CHAT, with_tools(pb.Tool(name=name)), "tools[0].name")
        for name in ("", "a b", "é", "a" * 65)
    ),
    invalid("two tools of a name", CHAT, with_tools(pb.Tool(name="f"), pb.Tool(name="f")), "tools[1].name"),
    *(
        invalid(
            f"parameters {parameters[:8]}",
            CHAT,
            with_tools(pb.Tool(name="f", parameters=parameters)),
            "tools[0].parameters",
        )
        for parameters in ("{", "[]", "true", '{"a": Infinity}', '{"a":' * 99 + "1" + "}" * 99)
    ),
    invalid("calls required of nobody", CHAT, chat(("user", "hi"), tool_choice=REQUIRED), "tool_choice.mode"),
    invalid("an unknown choice", CHAT, with_tools(A_TOOL, tool_choice=pb.ToolChoice(mode=9)), "tool_choice.mode"),  # type: ignore[arg-type]
    invalid(
        "an unknown tool",
        CHAT,
        with_tools(A_TOOL, tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name="g")),
        "tool_choice.name",
    ),
    invalid(
        "a name that is not asked for",
        CHAT,
        with_tools(A_TOOL, tool_choice=pb.ToolChoice(name="f")),
        "tool_choice.name",
    ),
    # Bytes.
    Row(
        "over the size limit",
        GENERATE,
        lambda _: prompt(text="x" * MAX_REQUEST_BYTES),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "MESSAGE_TOO_LARGE",
    ),
    malformed("undecodable bytes", (*GENERATE, *CHAT, "CreateSession", "Tokenize", "GetModel"), b"\xff\xff\xff\xff"),
    malformed("cut short", GENERATE, prompt().SerializeToString()[:-1]),
    malformed("text that is no UTF-8", (*GENERATE, "Tokenize"), INVALID_UTF8),
    malformed("session id that is no UTF-8", ("GetSession", "DeleteSession"), b"\x0a\x01\xff"),
    # Keys.
    *refused_key("no key", None),
    *refused_key("wrong key", "key-of-nobody"),
    *refused_key("empty key", ""),
]


swarm = tiny_swarm(
    ["0:2", "2:5"],
    keys=f"mine:{MINE}\nothers:{OTHERS}\n",
    client={"max_request_bytes": MAX_REQUEST_BYTES},
    api_key=MINE,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(swarm: Swarm) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(swarm.address) as channel:
        yield channel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions(swarm: Swarm, channel: grpc.aio.Channel) -> Sessions:
    stub, short = GenerationServiceStub(channel), pb.StoppingParameters(max_tokens=2)

    async def create(of: Any = stub, api_key: str = MINE) -> str:
        session = await of.CreateSession(pb.CreateSessionRequest(), metadata=key_metadata(api_key))
        return str(session.session_id)

    of_text, of_chat, deleted = await create(), await create(), await create()
    mine: Any = key_metadata(MINE)
    await stub.Generate(prompt(session_id=of_text, stopping=short), metadata=mine)
    await stub.Chat(chat(("user", "hi"), session_id=of_chat, stopping=short), metadata=mine)
    await stub.DeleteSession(pb.DeleteSessionRequest(session_id=deleted), metadata=mine)
    # Another client service over the same router, which keeps its sessions only for a moment.
    hasty = await swarm.add_client(session_ttl_s=0.05)
    async with open_channel(f"127.0.0.1:{hasty.port}") as other:
        expired = await create(GenerationServiceStub(other))
    await asyncio.sleep(0.1)
    foreign = await create(api_key=OTHERS)
    return Sessions(await create(), of_text, of_chat, foreign, expired, deleted)


@dataclass
class HopCalls:
    """The requests that hops received."""

    opened: list[bytes]
    stepped: list[bytes]

    @property
    def sessions(self) -> set[bytes]:
        return {*self.opened, *self.stepped}


@pytest.fixture
def hop_calls(monkeypatch: pytest.MonkeyPatch) -> HopCalls:
    """Records the requests to all hops, which serve them as usual."""
    calls = HopCalls([], [])
    open_session, submit = SessionTable.open, Engine.submit

    def listening_open(table: Any, request: Any, now_s: float) -> Any:
        calls.opened.append(request.session_id)
        return open_session(table, request, now_s)

    def listening_submit(engine: Any, queued: Any) -> None:
        calls.stepped.extend(queued.session_ids)
        submit(engine, queued)

    monkeypatch.setattr(SessionTable, "open", listening_open)
    monkeypatch.setattr(Engine, "submit", listening_submit)
    return calls


def check(refused: Refusal, row: Row, method: str) -> None:
    """Exact code, reason, domain and details; nothing of our insides."""
    where = f"{row.name}, {method}: {refused}"
    assert (refused.code, refused.reason, refused.domain) == (row.code, row.reason, "corolla.dev"), where
    assert refused.fields == row.fields, where
    assert ("ResourceInfo" in refused.details) == bool(row.resource), where
    if row.resource:
        assert refused.details["ResourceInfo"].resource_type == row.resource, where
    if row.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert refused.details["QuotaFailure"].violations, where
        assert refused.metadata["max_request_bytes"] == str(MAX_REQUEST_BYTES), where
    assert "RetryInfo" not in refused.details, f"a bad request does not become good by waiting: {where}"
    said = f"{refused.message} {refused.details}"
    assert not re.search(r"Traceback|Exception|Error\b(?!Info)|\.py\b|<class|127\.0\.0\.1|0x[0-9a-f]{6}", said), said
    assert refused.message, where


def rows_apart(sessions: Sessions) -> list[list[tuple[Row, str]]]:
    """Rows that may be tried at a time; those that lock the same session come one after the other."""
    groups: dict[object, list[tuple[Row, str]]] = {}
    for row in ROWS:
        session_id = getattr(row.request(sessions), "session_id", "")
        for method in row.methods:
            groups.setdefault(session_id or (row.name, method), []).append((row, method))
    return list(groups.values())


async def refuse_each(channel: grpc.aio.Channel, sessions: Sessions, rows: list[tuple[Row, str]]) -> None:
    for row, method in rows:
        check(await refusal(channel, method, row.request(sessions), api_key=row.api_key), row, method)


async def test_bad_input_is_refused_before_a_hop_is_called_and_leaves_a_running_stream_unharmed(
    swarm: Swarm, channel: grpc.aio.Channel, sessions: Sessions, hop_calls: HopCalls
) -> None:
    """Each row with each of its methods, while one answer runs: hops are called for that answer only."""
    async with swarm.connect() as client:
        options: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "seed": 5, "temperature": 1.0}
        undisturbed = await client.generate("the thin man", **options)
        hop_calls.opened.clear()
        hop_calls.stepped.clear()
        stream = client.stream("the thin man", **options)
        first = await anext(stream)
        (running,) = hop_calls.sessions
        refusals = asyncio.gather(*(refuse_each(channel, sessions, rows) for rows in rows_apart(sessions)))
        token_ids = list(first.token_ids)
        async for chunk in stream:
            token_ids.extend(chunk.token_ids)
        await refusals
    assert tuple(token_ids) == undisturbed.token_ids
    assert hop_calls.sessions == {running}


async def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "plain")
    for template in model.glob("chat_template*"):
        template.unlink()
    async with Swarm(tmp_path, model, ["0:5"]) as swarm, open_channel(swarm.address) as channel:
        for method in CHAT:
            row = invalid("no template", CHAT, chat(("user", "hi")), "messages")
            check(await refusal(channel, method, chat(("user", "hi"))), row, method)
        async with swarm.connect() as client:
            assert not (await client.models())[0].has_chat_template
            assert (await client.generate("the thin man", max_tokens=3)).token_ids


async def test_refusals_leave_nothing_behind(swarm: Swarm, sessions: Sessions, channel: grpc.aio.Channel) -> None:
    stub = GenerationServiceStub(channel)
    for session_id in (sessions.fresh, sessions.of_text, sessions.of_chat):
        await stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id), metadata=key_metadata(MINE))
    await swarm.until_empty()
