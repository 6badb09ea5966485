"""Callers get typed, retriable errors when parts of the swarm are missing or vanish, and no other caller notices."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from corolla.block_server.service import BlockServer
from corolla.chassis.channels import open_channel
from corolla.chassis.errors import NoChain, NonFiniteOutput
from corolla.client.service import ClientBounds
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.refusals import Refusal, refusal
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

PROMPT = "the thin man"


@pytest.fixture
async def complaints() -> AsyncIterator[list[str]]:
    """Unhandled failures that the event loop reported."""
    heard: list[str] = []

    def hear(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # gRPC's one poller for all loops may also complain here, of a loop that ended with an earlier test.
        if "never retrieved" in context["message"]:
            heard.append(str(context))

    asyncio.get_running_loop().set_exception_handler(hear)
    yield heard
    gc.collect()
    await asyncio.sleep(0)
    assert not heard


def check_unavailable(refused: Refusal, reason: str) -> None:
    assert (refused.code, refused.reason, refused.domain) == (grpc.StatusCode.UNAVAILABLE, reason, "corolla.dev")
    assert refused.retry_after_s > 0
    assert "127.0.0.1" not in f"{refused.message} {refused.details}", "addresses are not the caller's business"


@pytest.mark.parametrize(
    "spans, missing, uncovered", [(["0:2"], "2:5", "2:5"), (["1:3"], None, "0:1,3:5"), ([], "0:5", "0:5")], ids=str
)
async def test_no_complete_chain_names_the_uncovered_blocks_until_they_have_a_server(
    tmp_path: Path, model: Path, spans: list[str], missing: str | None, uncovered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corolla.chain.placement.SETTLING_S", 0.5)
    async with Swarm(tmp_path, model, [], num_clients=0) as swarm:
        for span in spans:
            await swarm.add_server(span)
        await swarm.add_client()

        async def servers_are_ready() -> bool:
            ready = [each for each in (await swarm.placement()).servers if each.state == router_pb2.SERVER_STATE_READY]
            return len(ready) == len(spans)

        await until(servers_are_ready)
        request = pb.GenerateRequest(text=PROMPT)
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
        async with open_channel(swarm.address) as channel, swarm.connect() as client:
            assert not (await client.models())[0].ready
            for method, message in (
                ("Generate", request), ("GenerateStream", request), ("Chat", chat), ("ChatStream", chat),
            ):  # fmt: skip
                refused = await refusal(channel, method, message)
                check_unavailable(refused, "NO_CHAIN")
                assert refused.metadata["uncovered_blocks"] == uncovered
            if missing is None:
                return
            session = client.session()
            with pytest.raises(NoChain):
                await session.generate(PROMPT, max_tokens=4)
            await swarm.add_server(missing)
            await swarm.until_ready()
            assert len((await client.generate(PROMPT, max_tokens=4, ignore_eos=True)).token_ids) == 4
            assert len((await session.generate(PROMPT, max_tokens=4, ignore_eos=True)).token_ids) == 4
            await session.delete()
        await swarm.until_empty()


async def until_sessions(server: BlockServer, num_sessions: int) -> None:
    await until(lambda: len(server.sessions) == num_sessions)


async def test_client_service_reports_a_broken_only_chain_and_frees_everything(
    tmp_path: Path, model: Path, complaints: list[str]
) -> None:
    patience = {"recovery_patience_s": 1.0}
    async with (
        Swarm(tmp_path, model, ["0:1", "1:3", "3:5"], client=patience) as swarm,
        open_channel(swarm.address) as channel,
    ):
        stopping = pb.StoppingParameters(max_tokens=5000, ignore_eos=True)
        request = pb.GenerateRequest(text=PROMPT, stopping=stopping, num_completions=3)
        ending = asyncio.create_task(refusal(channel, "GenerateStream", request))
        await until_sessions(swarm.servers[1], 3)
        await swarm.crash(swarm.servers[1])
        check_unavailable(await ending, "NO_CHAIN")
        refused = await refusal(channel, "Generate", request)
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.retry_after_s > 0
        swarm.servers.remove(lost := swarm.servers[1])
        await swarm.until_empty()
        assert swarm.clients[0].num_pending == 0
        await lost.stop()


async def test_a_recovery_waits_no_longer_than_its_callers(tmp_path: Path, model: Path) -> None:
    """One has set a time limit, the other a deadline."""
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(Swarm(tmp_path, model, ["0:2", "2:5"], num_clients=0))
        # The machine may pause in just the moment in which the callers can still be told.
        await swarm.add_client(bounds=ClientBounds(farewell_s=3.0))
        await swarm.until_ready()
        channel = await stack.enter_async_context(open_channel(swarm.address))

        def asking(time_limit_ms: int | None, timeout_s: float | None) -> asyncio.Task[Refusal]:
            stopping = pb.StoppingParameters(max_tokens=5000, ignore_eos=True, time_limit_ms=time_limit_ms)
            request = pb.GenerateRequest(text=PROMPT, stopping=stopping)
            return asyncio.create_task(refusal(channel, "GenerateStream", request, timeout_s=timeout_s))

        started_s = time.monotonic()
        endings = asking(4000, None), asking(None, 7.0)
        await until_sessions(swarm.servers[1], 2)
        await swarm.crash(lost := swarm.servers.pop())
        for ending in endings:
            check_unavailable(await ending, "NO_CHAIN")
        # A recovery by itself would wait for thirty seconds.
        assert time.monotonic() - started_s < 20
        await lost.stop()
        await swarm.until_empty()


async def test_a_server_that_stops_has_left_the_placement_for_good(tmp_path: Path, model: Path) -> None:
    async with Swarm(tmp_path, model, ["0:5", "0:5"]) as swarm:
        leaving = swarm.servers.pop()
        await leaving.stop()
        for _ in range(6):
            listed = {each.server.server_id for each in (await swarm.placement()).servers}
            assert listed == {swarm.servers[0].server_id}
            await asyncio.sleep(0.5)


async def test_a_non_finite_output_becomes_an_error_and_never_a_token(tmp_path: Path) -> None:
    sick = make_tiny_checkpoint("llama", tmp_path / "sick")
    for shard in sick.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if name.endswith("layers.4.mlp.down_proj.weight"):
                tensor[3, 5] = torch.nan
                save_file(tensors, shard, metadata={"format": "pt"})
                break
    async with Swarm(tmp_path, sick, ["0:2", "2:5"]) as swarm, swarm.connect() as client:
        async with open_channel(swarm.address) as channel:
            request = pb.GenerateRequest(text=PROMPT, num_completions=3)
            for method in ("Generate", "GenerateStream"):
                refused = await refusal(channel, method, request)
                assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "NON_FINITE")
                assert "RetryInfo" not in refused.details
        stream = client.stream(PROMPT)
        with pytest.raises(NonFiniteOutput):
            await anext(stream)
        async with client.session() as session:
            with pytest.raises(NonFiniteOutput):
                await session.generate(PROMPT)
            assert (await session.info()).num_tokens == 0
        await swarm.until_empty()


async def test_quarantines_are_counted_by_cause(tmp_path: Path, model: Path) -> None:
    async with Swarm(tmp_path, model, ["0:5", "0:5"]) as swarm:
        port = swarm.clients[0].metrics_port

        async def counted() -> tuple[float, float, float]:
            """Now in quarantine; ever for a step; ever for an opening."""
            return (
                await sample(port, "corolla_quarantined_servers"),
                await sample(port, "corolla_quarantines_total", cause="step"),
                await sample(port, "corolla_quarantines_total", cause="open"),
            )

        assert await counted() == (0, 0, 0)
        async with swarm.connect() as client:
            stream = client.stream("the thin man", max_tokens=300, ignore_eos=True)
            await anext(stream)
            (serving,) = [
                server
                for server, status in zip(swarm.servers, await swarm.statuses(), strict=True)
                if status.num_sessions
            ]
            await swarm.crash(serving)

            async def is_counted() -> bool:
                return await counted() == (1, 1, 0)

            # A quarantine lasts for seconds, and on a busy machine the rest of the answer may take as long.
            await until(is_counted)
            async for _ in stream:
                pass
