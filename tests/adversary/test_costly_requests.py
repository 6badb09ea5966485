"""However large its fields are, no request holds the client service up, or takes far more memory than its bytes."""

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor

from corolla.chassis.heap import settle
from corolla.client.api import servicer
from corolla.client.reply_sizes import ReplyRoom
from corolla.http import exchange
from corolla.http.completions import CompletionRequest
from corolla.v1 import generation_pb2 as pb
from tests.adversary.costly import Costly, HttpSchemas, rpc_requests
from tests.adversary.running import LONGEST_STALL_S, Running, running, slowness
from tests.checkpoints import CONTEXT_LENGTH, EOS, USER, make_tiny_checkpoint
from tests.integration.swarm import Swarm

MIB: Final = 1 << 20
TEXTS: Final = ("the thin man ", f"{USER}a{EOS}", "1")
SCHEMAS: Final = HttpSchemas()
MOST_TRIES: Final = 8
OWN_MIB: Final = 24
"""What a caller in this process takes for a request of 4 MiB, besides the service."""

GENERATION = pb.DESCRIPTOR.services_by_name["GenerationService"]
BASES: Final[dict[str, Any]] = {
    "GenerateRequest": pb.GenerateRequest(text="the thin man", stopping=pb.StoppingParameters(max_tokens=1)),
    "ChatRequest": pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="the")], stopping=pb.StoppingParameters(max_tokens=1)
    ),
    "TokenizeRequest": pb.TokenizeRequest(text="the"),
    "DetokenizeRequest": pb.DetokenizeRequest(token_ids=[1]),
    "ScoreRequest": pb.ScoreRequest(text="the", continuation_text="thin"),
    "EmbedRequest": pb.EmbedRequest(text="the"),
    "GetModelRequest": pb.GetModelRequest(model="tiny"),
}


@dataclass
class Interpreter:
    """How long no other Python code of this process ran; a thread that wakes up again and again notices.

    Only the process's own time counts: while others have the processors, nothing in it holds the interpreter.
    """

    longest_s: float = 0.0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Interpreter":
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        last_s, last_own_s = time.perf_counter(), time.process_time()
        while not self._stopped.wait(0.005):
            now_s, own_s = time.perf_counter(), time.process_time()
            self.longest_s = max(self.longest_s, min(now_s - last_s, own_s - last_own_s))
            last_s, last_own_s = now_s, own_s


@dataclass
class Cost:
    """What a request cost the process that serves it."""

    status: str
    loop_s: float
    interpreter_s: float
    num_mib: float


@dataclass
class Target:
    """A client service with block servers, in an event loop of its own."""

    services: Running
    address: str
    http_address: str

    def __post_init__(self) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(self.address, options=options)
        self._own = psutil.Process()

    def rpc(self, method: MethodDescriptor, data: bytes) -> str:
        path = f"/{method.containing_service.full_name}/{method.name}"
        channel: Any = self._channel
        try:
            if method.server_streaming:
                for _ in channel.unary_stream(path)(data, timeout=60):
                    pass
            else:
                channel.unary_unary(path)(data, timeout=60)
        except grpc.RpcError as failure:
            refused: Any = failure
            return str(refused.code().name)
        return "OK"

    def http(self, path: str, data: bytes) -> str:
        connection = http.client.HTTPConnection(self.http_address, timeout=60)
        try:
            connection.request("POST", path, data, {"content-type": "application/json"})
            reply = connection.getresponse()
            while reply.read(MIB):
                pass
            return str(reply.status)
        finally:
            connection.close()

    def cost(self, send: Callable[[], str]) -> Cost:
        settle()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the largest size so far is forgotten
        before, self.services.longest_s = self._own.memory_info().rss, 0.0
        with Interpreter() as interpreter:
            status = send()
        most = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        grown = int(most.split()[1]) * 1024 - before
        return Cost(status, self.services.longest_s, interpreter.longest_s, grown / MIB)

    def faults(self, request: Costly, send: Callable[[bytes], str], num_tries: int = MOST_TRIES) -> list[str]:
        """What the request costs too much of, each time that it is sent; the machine itself may pause."""
        data = request.make()
        most_mib, usual = 8 + OWN_MIB + 8 * len(data) / MIB, slowness()
        for _ in range(num_tries):
            cost = self.cost(lambda: send(data))
            before, usual = usual, slowness()
            most_s = LONGEST_STALL_S * max(before, usual)
            found = []
            if cost.status in ("500", "INTERNAL", "UNKNOWN"):
                found.append(f"{cost.status}")
            if max(cost.loop_s, cost.interpreter_s) > most_s:
                found.append(f"loop {cost.loop_s:.2f} s, interpreter {cost.interpreter_s:.2f} s")
            if cost.num_mib > most_mib:
                found.append(f"{cost.num_mib:.0f} MiB for {len(data) / MIB:.1f}")
            if not found:
                return []
        return [f"{request.name}: {cost.status}: {', '.join(found)}"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder: Path = tmp_path_factory.mktemp("costly")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    services, stack = running(), AsyncExitStack()

    async def start() -> Target:
        client = {"http_port": 0}
        swarm = await stack.enter_async_context(Swarm(folder, model, ["0:5"], client=client))
        async with swarm.connect() as connected:
            await connected.generate([1, 2, 3], max_tokens=4)
        return Target(services, swarm.address, swarm.url.removeprefix("http://"))

    yield services.call(start())
    services.call(stack.aclose())


def all_faults(target: Target, requests: Iterator[Costly], send: Callable[[bytes], str]) -> list[str]:
    return list(itertools.chain.from_iterable(target.faults(each, send) for each in requests))


METHODS = [each for each in GENERATION.methods if each.input_type.name in BASES]
OPERATIONS = SCHEMAS.operations


def rpcs(method: MethodDescriptor, *, pairs: bool) -> Iterator[Costly]:
    return rpc_requests(method, BASES[method.input_type.name], TEXTS, pairs=pairs)


# Whether two fields are large, and one request in how many is sent before each commit and in `make test-all`.
SAMPLES: Final = (
    (False, 13, pytest.mark.kind),
    (False, 1, pytest.mark.full),
    (True, 101, pytest.mark.kind),
    (True, 3, pytest.mark.full),
)


def cases(of_pairs: Iterable[Any], of_fields: Iterable[Any], name: str) -> list[Any]:
    """What is asked, with which fields are large, and how many requests are left out."""
    return [
        pytest.param(
            asked, pairs, step, marks=mark, id=f"{getattr(asked, name)}-{'pairs' if pairs else 'fields'}-{step}"
        )
        for pairs, step, mark in SAMPLES
        for asked in (of_pairs if pairs else of_fields)
    ]


# A method with a stream reads the same message by the same code as the one without.
@pytest.mark.parametrize(
    "method, pairs, step", cases([each for each in METHODS if not each.server_streaming], METHODS, "name")
)
def test_no_field_of_grpc_costs_more_than_its_bytes(
    target: Target, method: MethodDescriptor, pairs: bool, step: int
) -> None:
    """Nor do two fields multiply."""
    found = itertools.islice(rpcs(method, pairs=pairs), 0, None, step)
    assert all_faults(target, found, lambda data: target.rpc(method, data)) == []


@pytest.mark.parametrize("operation, pairs, step", cases(OPERATIONS, OPERATIONS, "path"))
def test_no_field_of_http_costs_more_than_its_bytes(target: Target, operation: Any, pairs: bool, step: int) -> None:
    found = itertools.islice(SCHEMAS.requests(operation.body, TEXTS, pairs=pairs), 0, None, step)
    assert all_faults(target, found, lambda data: target.http(operation.path, data)) == []


def echoes() -> bytes:
    """The prompts of one request, each of which comes back with its alternatives for each of several answers."""
    prompts = [[each] * (CONTEXT_LENGTH - 1) for each in range(1, 17)]
    return json.dumps({"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 20, "n": 8}).encode()


@dataclass(frozen=True)
class Mutant:
    """A limit that is taken out, and a request that it bounds."""

    owner: Any
    name: str
    without: Any
    path: str
    request: Callable[[], bytes]


def of_grpc(method: str, name: str) -> Callable[[], bytes]:
    """The request of a method that has this name."""
    return lambda: next(
        each for each in rpcs(GENERATION.methods_by_name[method], pairs=False) if name in each.name
    ).make()


def of_http(body: type, name: str) -> Callable[[], bytes]:
    return lambda: next(each for each in SCHEMAS.requests(body, TEXTS, pairs=False) if name in each.name).make()


MUTANTS = (
    Mutant(
        exchange,
        "check_values",
        lambda data: None,
        "/v1/completions",
        of_http(CompletionRequest, "unknown: many lists"),
    ),
    Mutant(servicer, "MAX_DETOKENIZED", 1 << 40, "Detokenize", of_grpc("Detokenize", "token_ids: many")),
    Mutant(ReplyRoom, "most_tokens", lambda *counted: None, "/v1/completions", echoes),
)


@pytest.mark.kind
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_limit_that_is_taken_out_is_missed(target: Target, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(data: bytes) -> str:
        if mutant.path.startswith("/"):
            return target.http(mutant.path, data)
        return target.rpc(GENERATION.methods_by_name[mutant.path], data)

    request = Costly(mutant.name, mutant.request)
    assert target.faults(request, send) == []
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.without)
    # A fast processor may make up for it once.
    assert any(target.faults(request, send, num_tries=1) for _ in range(MOST_TRIES))
