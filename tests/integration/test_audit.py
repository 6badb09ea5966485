"""The audit log: every call of a caller, every act of a service, and every denial."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from corolla.chassis import audit
from corolla.chassis.channels import open_channel
from corolla.chassis.errors import CorollaError, ScopeDenied, SessionNotFound, Unauthenticated
from corolla.client.api.keys import NewKey, Scope
from corolla.sdk.async_client import AsyncClient
from corolla.trust.workload import Role
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2, router_pb2_grpc
from corolla.v1.generation_pb2_grpc import GenerationServiceStub
from corolla.wire.network import Network
from tests.integration.swarm import Swarm, tiny_swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = NewKey("acme", scopes=[Scope.GENERATE, Scope.CHAT, Scope.SESSIONS])
SIMPLE = "a-simple-key-of-bob"
SECRET = "the prompt of somebody"
STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


swarm = tiny_swarm(["0:5"], keys=f"{KEY.record.line}\nbob:{SIMPLE}\n", api_key=KEY.key, is_encrypted=True)


class Lines(logging.Handler):
    """What is written from now on: facts, by the line."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        facts = {key: value for key, value in vars(record).items() if key not in STANDARD}
        self.facts.append({"event": record.getMessage(), **facts})

    def of(self, method: str) -> list[dict[str, Any]]:
        return [each for each in self.facts if each.get("method", "").endswith(f"/{method}")]


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, lines = logging.getLogger(audit.LOGGER), Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(logging.NOTSET)


async def test_a_call_says_who_what_and_how_much(swarm: Swarm, lines: Lines) -> None:
    async with swarm.connect() as client:
        await client.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
    (line,) = lines.of("Generate")
    assert line["event"] == "call"
    assert line["outcome"] == "OK"
    assert (line["tenant"], line["key"]) == ("acme", KEY.record.id)
    assert (line["prompt_tokens"], line["generated_tokens"], line["recoveries"]) == (3, 4, 0)
    assert line["peer"].startswith("ipv4:127.0.0.1")


@pytest.mark.parametrize(
    "metadata, request_id, named",
    [
        ([("x-request-id", "{mine}/1")], "answer-1", {"x_request_id": "{mine}/1", "request_id": "answer-1"}),
        ([("x-request-id", "of two words")], "", {}),
        ([("x-request-id", "x" * 129)], "two words", {}),
    ],
)
async def test_a_call_and_its_answer_have_the_names_that_their_caller_gave(
    swarm: Swarm, lines: Lines, metadata: list[tuple[str, str]], request_id: str, named: dict[str, str]
) -> None:
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1]), request_id=request_id)
    request.stopping.max_tokens = 2
    async with open_channel(swarm.address) as channel:
        stub = GenerationServiceStub(channel)
        with suppress(grpc.RpcError):
            await stub.Generate(request, metadata=[("authorization", f"Bearer {KEY.key}"), *metadata])
    (line,) = lines.of("Generate")
    assert {key: line[key] for key in ("x_request_id", "request_id") if key in line} == named


async def test_a_streams_line_comes_with_its_end_also_where_its_caller_leaves(swarm: Swarm, lines: Lines) -> None:
    async with swarm.connect() as client:
        async for _ in client.stream([1, 2, 3], max_tokens=4, ignore_eos=True):
            pass
        async with client.stream([1, 2, 3], max_tokens=50, ignore_eos=True) as stream:
            async for _ in stream:
                break
    await until(lambda: [each["outcome"] for each in lines.of("GenerateStream")] == ["OK", "CANCELLED"])
    assert lines.of("GenerateStream")[1]["generated_tokens"] >= 1


async def test_refused_calls_have_their_reason(swarm: Swarm, lines: Lines) -> None:
    async with AsyncClient(swarm.address, api_key=KEY.key) as client:
        with pytest.raises(ScopeDenied):
            await client.tokenize("x")
        with pytest.raises(SessionNotFound):
            await client.get_session("0" * 32)
    async with AsyncClient(swarm.address, api_key="key-of-nobody-0123") as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.generate("x", max_tokens=1)
    assert [(each["outcome"], each["key"]) for each in lines.of("Tokenize")] == [("SCOPE_DENIED", KEY.record.id)]
    assert [each["outcome"] for each in lines.of("GetSession")] == ["SESSION_NOT_FOUND"]
    (line,) = lines.of("Generate")
    assert line["outcome"] == "UNAUTHENTICATED"
    assert "tenant" not in line


async def test_keys_of_the_simple_form_have_no_id(swarm: Swarm, lines: Lines) -> None:
    async with AsyncClient(swarm.address, api_key=SIMPLE) as client:
        await client.models()
    (line,) = lines.of("ListModels")
    assert line["tenant"] == "bob"
    assert "key" not in line


async def test_no_line_holds_a_text_a_key_or_a_sessions_id(swarm: Swarm, lines: Lines) -> None:
    async with swarm.connect() as client:
        session_id = (await client.create_session()).session_id
        await client.generate(SECRET, session=session_id, max_tokens=4, stop=["never"])
        with pytest.raises(CorollaError):
            await client.generate(SECRET, model="no-such-model", max_tokens=4)
        await client.delete_session(session_id)
    written = repr(lines.facts)
    assert len(lines.facts) >= 4
    for each in (SECRET, "never", session_id, KEY.key, KEY.key.split("_", 2)[2]):
        assert each not in written


async def test_acts_between_services_name_the_workload(swarm: Swarm, lines: Lines) -> None:
    async with swarm.connect() as client:
        await client.delete_session((await client.create_session()).session_id)
    (line,) = lines.of("CreateSessionRecord")
    assert line["workload"].startswith("spiffe://test/client/")
    assert lines.of("Heartbeat") == []


async def test_who_is_denied_a_call_is_named(swarm: Swarm, lines: Lines) -> None:
    network = Network.from_folder(swarm.identities.folder_of(Role.LIBRARY, "rogue"))
    async with network.open_channel(swarm.router_address) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(Exception, match="may not call"):
            await stub.TakeQuotas(router_pb2.TakeQuotasRequest())
    (line,) = lines.of("TakeQuotas")
    assert (line["outcome"], line["workload"]) == ("ROLE_DENIED", "spiffe://test/library/rogue")


async def test_who_is_denied_a_stream_is_named(swarm: Swarm, lines: Lines) -> None:
    network = Network.from_folder(swarm.identities.folder_of(Role.OPERATOR, "rogue"))
    stream = network.connect(swarm.servers[0].address, lambda _: lambda frame: None)
    await stream.ended
    denied = [each for each in lines.facts if each["event"] == "stream"]
    assert [(each["outcome"], each["workload"]) for each in denied] == [("ROLE_DENIED", "spiffe://test/operator/rogue")]
