"""A pool of real processes that organises itself: one leaves for good, another one takes its blocks."""

import asyncio
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from corolla.block_server.process import BlockServerProcess
from corolla.block_server.service import BlockServer
from corolla.block_server.settings import BlockServerSettings
from corolla.chassis.errors import StartupError
from corolla.local.options import StackOptions
from corolla.local.stack import Stack
from corolla.router.intervals import RouterIntervals
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import router_pb2
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.reference import Unsplit

PROMPT = "the thin man"
OPTIONS: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True, "temperature": 0.9, "seed": 3}
# Leases, settling and the patience of recoveries are those that everybody has.
ENVIRONMENT = {
    # The servers are alike, and share two cores with other tests: what they measure must not move any of them.
    "COROLLA_REBALANCE_MIN_GAIN": "10"
}
# Within such a lease, only the exit of the process tells that it is lost.
SPARE_LEASE_S = 20
SPARES = {"COROLLA_SPARE_MIB": "64", "COROLLA_LEASE_MS": str(1000 * SPARE_LEASE_S)}


def held(placement: router_pb2.Placement | None) -> dict[str, str]:
    """The spans of the ready servers, by address."""
    return {
        each.server.address: f"{each.span.start}:{each.span.end}"
        for each in (placement.servers if placement is not None else ())
        if each.state == router_pb2.SERVER_STATE_READY
    }


def numerics(placement: router_pb2.Placement | None) -> dict[str, str]:
    """The digests of how servers compute, by their spans."""
    return {
        f"{each.span.start}:{each.span.end}": each.load.numerics
        for each in (placement.servers if placement is not None else ())
    }


@pytest.mark.parametrize(
    "number, are_spares", [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGKILL, True)],
    ids=["killed", "drained", "spare"],
)  # fmt: skip
@pytest.mark.full
async def test_the_blocks_of_a_server_that_left_for_good_are_taken_by_another(
    tmp_path: Path, number: signal.Signals, are_spares: bool
) -> None:
    changes = {"max_position_embeddings": 8192}
    model = make_tiny_checkpoint("llama", tmp_path / "tiny", num_blocks=4, config_changes=changes)
    options = StackOptions(
        model=str(model), blocks="auto", num_servers=3, log_folder=tmp_path, restarts=False,
        environment={**ENVIRONMENT, **(SPARES if are_spares else {})},
    )  # fmt: skip
    stack = Stack(options)
    await asyncio.to_thread(stack.start)
    try:
        async with AsyncClient(stack.client_address) as client:

            async def spans() -> dict[str, str]:
                return held(await asyncio.to_thread(stack.placement))

            async def all_are_ready() -> bool:
                return len(await spans()) == 3

            await until(all_are_ready)
            all_were_ready_s = time.monotonic()
            before = await spans()
            held_twice, held_once = sorted({"0:2", "2:4"}, key=list(before.values()).count, reverse=True)
            assert sorted(before.values()) == sorted([held_twice, held_twice, held_once])

            async def is_kept() -> bool:
                placement = await asyncio.to_thread(stack.placement)
                kept = [span for each in (placement.servers if placement else ()) for span in each.load.spare_spans]
                return held_once in {f"{span.start}:{span.end}" for span in kept}

            if are_spares:
                await until(is_kept)
                # The router orders no takeover before it has listened for a lease.
                await asyncio.sleep(all_were_ready_s + SPARE_LEASE_S - time.monotonic())
            digests = numerics(await asyncio.to_thread(stack.placement))
            undisturbed = await client.generate(PROMPT, **OPTIONS)
            streams = [client.stream(PROMPT, **OPTIONS) for _ in range(3)]
            heads = [(await anext(stream)).token_ids for stream in streams]

            leaver = next(each for each in stack.servers if before[each.address] == held_once)
            stack.kill(leaver.name, number)
            for head, stream in zip(heads, streams, strict=True):
                rest = [token_id async for chunk in stream for token_id in chunk.token_ids]
                assert (*head, *rest) == undisturbed.token_ids

            # Answers that were quick have ended before the move.
            async def has_moved() -> bool:
                return sorted((await spans()).values()) == ["0:2", "2:4"]

            await until(has_moved)
            after = await spans()
            assert leaver.address not in after
            assert numerics(await asyncio.to_thread(stack.placement)) == digests
            # The mover is the same process, at the same address, and its metrics are where they were.
            mover = next(each for each in stack.servers if after.get(each.address) == held_once)
            assert stack.pid(mover.name) is not None
            assert (await client.generate(PROMPT, **OPTIONS)).token_ids == undisturbed.token_ids
            assert await sample(mover.metrics_port, "corolla_hop_step_seconds_count") > 0
            async with client.session() as session:
                for _ in range(2):
                    await session.generate(PROMPT, max_tokens=4)
    finally:
        await asyncio.to_thread(stack.stop)


@pytest.mark.parametrize("stage", ["leaves", "comes back"])
async def test_a_process_that_is_stopped_while_it_moves_ends_all_the_same(tmp_path: Path, stage: str) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny", num_blocks=4)
    async with Swarm(tmp_path, model, ["0:2", "2:4"], num_clients=0, intervals=RouterIntervals(settle_s=0.1)) as swarm:
        given: dict[str, Any] = {
            "host": "127.0.0.1", "advertised_host": "127.0.0.1", "port": 0, "control_port": 0,
            "metrics_host": "127.0.0.1", "metrics_port": 0, "router": swarm.router_address,
            "model": str(model), "capacity_blocks": 2, "threads": 1, "grace_s": 0.5,
        }  # fmt: skip
        process = BlockServerProcess(BlockServerSettings(**given))
        await process.start()
        first = process.incarnation
        assert first is not None
        held = next(each.span.start for each in (await swarm.placement()).servers if each.server.movable)

        async def has_come_so_far() -> bool:
            if stage == "leaves":
                return process.incarnation is not first
            return process.incarnation not in (None, first)

        # The one that it does not double leaves for good.
        leaver = swarm.servers.pop(1 if held == 0 else 0)
        await leaver.stop()
        await until(has_come_so_far)
        await asyncio.wait_for(process.stop(), 30)
        addresses = {each.server.address for each in (await swarm.placement()).servers}
        assert addresses == {swarm.servers[0].address}
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", first.port)) != 0


@pytest.mark.full
async def test_servers_shrink_until_a_model_that_no_two_hold_is_served(tmp_path: Path) -> None:
    changes = {"hidden_size": 256, "intermediate_size": 64}
    model = make_tiny_checkpoint("llama", tmp_path / "tiny", config_changes=changes)
    # Three MiB hold three blocks, or two and the embedding or the head; one MiB holds a block, and neither of those.
    memories = (3, 3, 1)
    async with Swarm(tmp_path, model, [], num_clients=0, intervals=RouterIntervals(settle_s=0.1)) as swarm:
        processes: list[BlockServerProcess] = []
        try:
            for weights_mib in memories:
                given: dict[str, Any] = {
                    "host": "127.0.0.1", "advertised_host": "127.0.0.1", "port": 0, "control_port": 0,
                    "metrics_host": "127.0.0.1", "metrics_port": 0, "router": swarm.router_address,
                    "model": str(model), "weights_mib": weights_mib, "threads": 1, "products": "library",
                    "grace_s": 0.5,
                }  # fmt: skip
                processes.append(BlockServerProcess(BlockServerSettings(**given)))
                await processes[-1].start()
                joined = await swarm.placement()
                assert joined.uncovered, "each gets what helps most, and that is not enough"
            lengths = {each.server.server_id: each.span.end - each.span.start for each in joined.servers}

            async def is_served() -> bool:
                return not (await swarm.placement()).uncovered

            await until(is_served)
            placement = await swarm.placement()
            moved = [each for each in placement.servers if each.server.server_id not in lengths]
            assert moved, "a server moved"
            assert sum(each.span.end - each.span.start for each in placement.servers) < sum(lengths.values())
            await swarm.add_client()
            await swarm.until_ready()
            unsplit = Unsplit(model)
            prompt_ids = unsplit.encode(PROMPT)
            async with swarm.connect() as client:
                answer = await client.generate(PROMPT, max_tokens=24, ignore_eos=True)
            assert list(answer.token_ids) == unsplit.generate(prompt_ids, 24, ignore_eos=True).token_ids
        finally:
            for client_service in swarm.clients:
                await client_service.stop()
            swarm.clients.clear()
            await asyncio.gather(*(each.stop() for each in processes))


@pytest.mark.parametrize("taken", ["port", "control_port", "metrics_port"])
async def test_a_block_server_that_found_a_port_taken_starts_once_it_is_free(taken: str) -> None:
    with ExitStack() as stack:
        sockets = {
            name: stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for name in ("port", "control_port", "metrics_port")
        }
        ports = {name: each.getsockname()[1] for name, each in sockets.items()}
        for name, each in sockets.items():
            if name != taken:
                each.close()
        given: dict[str, Any] = {"host": "127.0.0.1", "metrics_host": "127.0.0.1", "model": "none", "router": "none:1"}
        settings = BlockServerSettings(**given, **ports)
        with pytest.raises(StartupError):
            BlockServer(settings)
    await BlockServer(settings).stop()
