"""Servers that leave while answers run: their sessions go to a peer, and nobody notices."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corolla.block_server.service import BlockServer
from corolla.chassis.errors import NoChain
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

PROMPTS = tuple(f"{words} in the inner tent " * repeats for words, repeats in (("the thin man", 1), ("anthem", 9)))
OPTIONS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
RECOMPUTED = "corolla_recomputed_tokens_total"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for answers that last until they are disturbed."""
    folder = tmp_path_factory.mktemp("drain") / "tiny"
    return make_tiny_checkpoint("llama", folder, config_changes={"max_position_embeddings": 8192})


def num_sessions(server: BlockServer) -> int:
    return len(server._sessions or ())


async def metric(server: BlockServer, name: str, **labels: str) -> float:
    return await sample(server.metrics_port, name, **labels)


async def test_every_server_leaves_in_turn_and_nothing_is_computed_twice(tmp_path: Path, model: Path) -> None:
    grace = {"grace_s": 20.0}
    async with (
        Swarm(tmp_path, model, ["0:2", "2:5"], server=grace, client={"prefill_chunk_tokens": 16}) as swarm,
        swarm.connect() as client,
    ):
        undisturbed = [(await client.generate(text, **OPTIONS)).token_ids for text in PROMPTS]
        answers = [asyncio.create_task(client.generate(text, **OPTIONS)) for text in PROMPTS for _ in "abc"]
        for _ in range(2):
            leaving = swarm.servers.pop(0)
            await until_held(leaving, len(answers))
            await swarm.add_server(leaving.settings.blocks)
            await asyncio.wait_for(leaving.stop(), 10)
        given = await asyncio.gather(*answers)
        assert [each.token_ids for each in given] == [undisturbed[0]] * 3 + [undisturbed[1]] * 3
        assert all(each.usage.recoveries == 2 for each in given)
        port = swarm.clients[0].metrics_port
        assert await sample(port, RECOMPUTED) == 0
        assert await sample(port, "corolla_session_recoveries_total", cause="hop_leaving", method="reopen") == 12
        for server in swarm.servers:
            assert await metric(server, "corolla_handover_bytes_total", direction="in") > 0
        await swarm.until_empty()


async def test_idle_conversations_are_found_where_they_were_handed_to(tmp_path: Path, model: Path) -> None:
    async with (
        Swarm(tmp_path, model, ["0:2", "2:5", "2:5"], num_clients=2) as swarm,
        swarm.connect() as client,
        swarm.connect(1) as other,
    ):
        sessions = [(await client.create_session()).session_id for _ in range(2)]
        for session_id in sessions:
            await client.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, session=session_id)
        expected = await client.generate(PROMPTS[1], max_tokens=40, ignore_eos=True, session=sessions[0])
        assert expected.usage.cached_tokens > 0
        for span in ("0:2", "2:5"):
            await swarm.add_server(span)
        for leaving in [swarm.servers.pop(0) for _ in range(3)]:
            await asyncio.wait_for(leaving.stop(), 10)
        # Also one that never heard of the session before goes on where it was.
        answer = await other.generate(PROMPTS[1], max_tokens=40, ignore_eos=True, session=sessions[1])
        assert answer.token_ids == expected.token_ids
        assert answer.usage.cached_tokens == expected.usage.cached_tokens
        for port in (each.metrics_port for each in swarm.clients):
            assert await sample(port, RECOMPUTED) == 0
        transcript = await other.get_session(sessions[1])
        assert transcript.num_turns == 2
        for session_id in sessions:
            await client.delete_session(session_id)
        await swarm.until_empty()


async def test_without_a_peer_a_server_serves_until_its_time_is_over(tmp_path: Path, model: Path) -> None:
    async with (
        Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 20.0}) as swarm,
        swarm.connect() as client,
    ):
        undisturbed = await client.generate(PROMPTS[0], **OPTIONS)
        await swarm.until_empty()
        answer = asyncio.create_task(client.generate(PROMPTS[0], **OPTIONS))
        leaving = swarm.servers.pop()
        await until_held(leaving, 1)
        await asyncio.wait_for(leaving.stop(), 15)
        # It ended by itself, and only then the server did.
        assert (await answer).token_ids == undisturbed.token_ids
        assert (await answer).usage.recoveries == 0
        with pytest.raises(NoChain):
            await client.generate(PROMPTS[0], **OPTIONS)
        await swarm.until_empty()


async def test_an_answer_whose_server_finds_no_peer_in_time_is_replayed(tmp_path: Path, model: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 1.0}) as swarm, swarm.connect() as client:
        undisturbed = (await client.generate(PROMPTS[0], **options)).token_ids
        await swarm.until_empty()
        answer = asyncio.create_task(client.generate(PROMPTS[0], **options))
        leaving = swarm.servers.pop()
        await until_held(leaving, 1)
        # Each holds a part of the span only.
        await swarm.add_server("2:3")
        await swarm.add_server("3:5")
        await leaving.stop()
        given = await answer
        assert given.token_ids == undisturbed
        assert given.usage.recoveries >= 1
        await swarm.until_empty()


async def until_held(server: BlockServer, count: int) -> None:
    async def is_held() -> bool:
        return num_sessions(server) == count

    await until(is_held)
