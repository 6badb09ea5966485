"""Block servers that compute in two ways: those that compute like a lost one replace it, and usage says where not."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corolla.block_server.service import BlockServer
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import Usage
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

PROMPT = "the thin man in the inner tent " * 6
OPTIONS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
WAYS = ({"attention": "compiled"}, {"attention": "sdpa"})


async def lose(swarm: Swarm, victim: BlockServer) -> None:
    """The server has the session, and dies in mid-answer, some tokens after the last loss."""
    port = swarm.servers[0].metrics_port
    begun = await sample(port, "corolla_hop_tokens_total", kind="decode")

    async def goes_on() -> bool:
        return bool(victim.sessions) and await sample(port, "corolla_hop_tokens_total", kind="decode") > begun + 10

    await until(goes_on)
    await swarm.die(victim)
    swarm.servers.remove(victim)


async def digests(swarm: Swarm) -> dict[str, str]:
    """The numerics of all servers, by address, once each has announced them."""
    named: dict[str, str] = {}

    async def are_known() -> bool:
        named.update({each.server.address: each.load.numerics for each in (await swarm.placement()).servers})
        return all(named.values())

    await until(are_known)
    return named


async def slowly(client: AsyncClient) -> tuple[list[int], Usage]:
    """The answer, read so slowly that servers can die within it."""
    token_ids: list[int] = []
    async for chunk in client.stream(PROMPT, **OPTIONS):
        token_ids += chunk.token_ids
        await asyncio.sleep(0.03)
    assert chunk.usage is not None
    return token_ids, chunk.usage


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.kind)])
async def test_a_lost_server_is_replaced_by_one_that_computes_alike(tmp_path: Path, model: Path, dtype: str) -> None:
    """In float32, usage says nothing when another kind takes over, since the tokens stay the same."""
    settings = {"dtype": dtype, "prefix_cache": False}
    client_settings = {"dtype": dtype, "recovery_patience_s": 30.0}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server={**settings, **WAYS[0]}, client=client_settings) as swarm:
        first = swarm.servers[1]
        async with swarm.connect() as client:
            expected = (await client.generate(PROMPT, **OPTIONS)).token_ids
            answering = asyncio.create_task(slowly(client))
            alike = await swarm.add_server("2:5")
            others = [await swarm.add_server("2:5", **WAYS[1]) for _ in range(3)]
            named = await digests(swarm)
            assert named[first.address] == named[alike.address]
            assert named[alike.address] not in {named[each.address] for each in others}
            assert all("+" in named[each.address] for each in (alike, *others)), "they have the head"
            assert "+" not in named[swarm.servers[0].address]
            kinds = {each.server.address: each.server.kind for each in (await swarm.placement()).servers}
            # Here, the settings decide alone; the router placed the servers by them before their numerics were known.
            assert len(set(kinds.values())) == 2
            assert len({(kinds[address], numerics.split("+")[0]) for address, numerics in named.items()}) == 2
            await lose(swarm, first)
            await lose(swarm, alike)
            token_ids, usage = await answering
            assert usage.recoveries == 2
            if dtype == "float32":
                assert (tuple(token_ids), usage.may_differ_from_token) == (expected, None)
            else:
                assert usage.may_differ_from_token is not None
                assert 0 < usage.may_differ_from_token < len(token_ids)
            changes = await sample(swarm.clients[0].metrics_port, "corolla_numerics_changes_total")
            assert changes == (0 if dtype == "float32" else 1)
        await swarm.until_empty()
        for dead in (first, alike):
            await dead.stop()


@pytest.mark.kind
async def test_a_conversation_remembers_that_its_server_was_replaced_by_another_kind(
    tmp_path: Path, model: Path
) -> None:
    settings = {"dtype": "bfloat16", **WAYS[0]}
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    async with (
        Swarm(tmp_path, model, ["0:2", "2:5"], server=settings, client={"dtype": "bfloat16"}) as swarm,
        swarm.connect() as client,
        client.session() as session,
    ):
        first = await session.generate(PROMPT, **options)
        assert first.usage.may_differ_from_token is None
        await swarm.add_server("2:5", **WAYS[1])
        leaving = swarm.servers.pop(1)
        # The idle session is handed over, and the router writes the new hop into its record.
        await leaving.stop()
        usages = [(await session.generate(" on", **options)).usage for _ in range(2)]
        assert [each.may_differ_from_token for each in usages] == [0, 0]
        fresh = await client.generate(PROMPT, **options)
        assert fresh.usage.may_differ_from_token is None
