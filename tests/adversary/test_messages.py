"""Any message to a client service or a router, and damaged ones: answers and statuses of the error tree, no other."""

import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import DOMAIN
from corolla.v1 import generation_pb2, router_pb2
from tests.adversary.messages import Known, damaged, messages
from tests.adversary.running import REASONS, Running, running
from tests.checkpoints import CONTEXT_LENGTH, VOCAB_SIZE, make_tiny_checkpoint
from tests.embedded_redis import EmbeddedRedis
from tests.integration.refusals import refusal_of
from tests.integration.router.conftest import BlockServer, running_router
from tests.integration.swarm import Swarm

CALL_TIMEOUT_S: Final = 5.0
FEW, MANY = 10, 100
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
ROUTER = router_pb2.DESCRIPTOR.services_by_name["RouterService"]


@dataclass
class Target:
    """A service that is to be called, and values that mean something to it."""

    services: Running
    address: str
    known: Known

    async def outcome(self, method: MethodDescriptor, data: bytes) -> str:
        """The reason of the refusal; empty where there was an answer, or none in time."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        async with open_channel(self.address) as opened:
            channel: Any = opened
            try:
                if method.server_streaming:
                    call = channel.unary_stream(path)(data, timeout=CALL_TIMEOUT_S)
                    await call.read()
                    call.cancel()
                else:
                    await channel.unary_unary(path)(data, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return ""
                refusal = refusal_of(failure)
                assert refusal.domain == DOMAIN
                return refusal.reason
        return ""


@pytest.fixture(scope="module")
def client_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder: Path = tmp_path_factory.mktemp("messages")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    services, stack = running(), AsyncExitStack()

    async def start() -> Target:
        swarm = await stack.enter_async_context(Swarm(folder, model, ["0:3", "3:5"]))
        async with swarm.connect() as client:
            sessions = [(await client.create_session()).session_id for _ in range(2)]
            await client.generate([1, 2, 3], max_tokens=4, session=sessions[0])
        texts = ["tiny", *sessions, secrets.token_hex(16), "user", "assistant", "system", "the thin man"]
        return Target(services, swarm.address, {str: texts, int: [4, VOCAB_SIZE - 1, VOCAB_SIZE, CONTEXT_LENGTH]})

    yield services.call(start())
    services.call(stack.aclose())


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    redis = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    services, stack = running(), AsyncExitStack()

    async def start() -> Target:
        router = await stack.enter_async_context(running_router(redis.url, redis_timeout_ms=5000))
        server = BlockServer(router, "m")
        await server.register("0:10")
        texts = ["m", server.server_id, server.description.address, "f", "t", secrets.token_hex(16), "a:1"]
        return Target(services, f"127.0.0.1:{router.process.port}", {str: texts, int: [10, 30]})

    yield services.call(start())
    services.call(stack.aclose())
    redis.stop()


def check(target: Target, method: MethodDescriptor, num_examples: int) -> None:
    whole = messages(message_factory.GetMessageClass(method.input_type), target.known)
    in_bytes = whole.map(lambda message: message.SerializeToString())

    @settings(max_examples=num_examples)
    @given(in_bytes | damaged(in_bytes) | st.binary(max_size=64))
    def call(data: bytes) -> None:
        reason = target.services.call(target.outcome(method, data))
        assert not reason or reason in REASONS

    with target.services.watched():
        call()


NUMBERS = pytest.mark.parametrize("num_examples", [FEW, pytest.param(MANY, marks=pytest.mark.full)])


@NUMBERS
@pytest.mark.parametrize("method", list(GENERATION.methods), ids=lambda method: method.name)
def test_whatever_callers_send_is_answered_or_refused(
    client_service: Target, method: MethodDescriptor, num_examples: int
) -> None:
    check(client_service, method, num_examples)


@NUMBERS
@pytest.mark.parametrize("method", list(ROUTER.methods), ids=lambda method: method.name)
def test_whatever_services_send_a_router_is_answered_or_refused(
    router: Target, method: MethodDescriptor, num_examples: int
) -> None:
    check(router, method, num_examples)
