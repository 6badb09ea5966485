"""What a tenant is guaranteed, pages and places, is there for it while another one takes all that it can get."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from corolla.chassis.errors import OutOfPages, SettingsError
from corolla.sdk.async_client import AsyncClient
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm, tiny_swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = {tenant: f"key-of-{tenant}-0123456789" for tenant in ("noisy", "quiet")}
GUARANTEED_TOKENS = 8192
LONG = 12_000
SHORTEST = 6000
"""Tokens of answers that do not come to their end while no caller takes them; fewer tokens than that are
left where there is no room for another one."""


swarm = tiny_swarm(
    ["0:2", "2:5"], context_length=16384, keys="".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()),
    quotas={"quiet": {"guaranteed_tokens": GUARANTEED_TOKENS, "guaranteed_sequences": 2}}, server={"kv_cache_mib": 64},
    client={"max_running_requests": 64}, api_key=KEYS["quiet"],
)  # fmt: skip


def connect(swarm: Swarm, tenant: str, client: int = 0) -> AsyncClient:
    return AsyncClient(swarm.address_of(client), api_key=KEYS[tenant])


async def fill_pages(swarm: Swarm, noisy: AsyncClient, stack: AsyncExitStack) -> int:
    """Begins as many answers as there are pages for, and takes nothing of them. Returns how many there are."""
    num_tokens, num_open = LONG, 0
    while num_tokens >= SHORTEST:
        stream = noisy.stream([1, 2, 3], max_tokens=num_tokens, ignore_eos=True)
        try:
            await anext(stream)
        except OutOfPages:
            num_tokens //= 2
        else:
            num_open += 1
            stack.callback(stream.close)
    return num_open


async def test_pages_are_there_for_whom_they_are_guaranteed(swarm: Swarm) -> None:
    async with connect(swarm, "noisy") as noisy, connect(swarm, "quiet") as quiet, AsyncExitStack() as stack:
        assert await fill_pages(swarm, noisy, stack) >= 2
        page_tokens = swarm.servers[0].settings.num_page_tokens

        async def are_kept() -> bool:
            kept = await sample(swarm.servers[0].metrics_port, "corolla_kv_guaranteed_pages", state="kept")
            return kept == GUARANTEED_TOKENS / page_tokens

        await until(are_kept)
        # Four at a time, each a quarter of what is guaranteed.
        for _ in range(4):
            stream = quiet.stream([1, 2, 3], max_tokens=GUARANTEED_TOKENS // 4 - 3, ignore_eos=True)
            await anext(stream)
            stack.callback(stream.close)
        with pytest.raises(OutOfPages):
            await quiet.generate([1, 2, 3], max_tokens=SHORTEST, ignore_eos=True)
    await swarm.until_empty()
    assert await sample(swarm.servers[0].metrics_port, "corolla_kv_guaranteed_pages", state="missing") == 0


async def test_places_are_there_for_whom_they_are_guaranteed(swarm: Swarm) -> None:
    """No request waits here: one that cannot run is refused."""
    service = await swarm.add_client(max_running_requests=6, max_waiting_requests=8)
    number = swarm.clients.index(service)
    async with connect(swarm, "noisy", number) as noisy, connect(swarm, "quiet", number) as quiet:
        # The caller takes only the first token of those that run.
        streams = [noisy.stream([1, 2, 3], max_tokens=LONG, ignore_eos=True) for _ in range(4 + 8)]
        begun = [asyncio.ensure_future(anext(each)) for each in streams]

        async def are_all_there() -> bool:
            counts = [
                await sample(service.metrics_port, f"corolla_num_requests_{each}") for each in ("running", "waiting")
            ]
            return counts == [4, 8]

        await until(are_all_there)
        for _ in range(3):
            await asyncio.gather(*(quiet.generate([1, 2, 3], max_tokens=4, ignore_eos=True) for _ in range(2)))
        assert await are_all_there()
        for each in begun:
            each.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        for stream in streams:
            stream.close()
    await swarm.until_empty()


async def test_a_changed_file_is_taken_and_says_what_is_missing(swarm: Swarm, tmp_path: Path) -> None:
    file = tmp_path / "quotas"
    file.write_text("{}")
    server = await swarm.add_server("0:5", quotas_file=file)
    num_pages = (await swarm.statuses())[-1].num_pages
    more = {"tenants": {"a": {"guaranteed_tokens": 32 * 3 * num_pages}, "b": {"guaranteed_tokens": 32 * num_pages}}}
    file.write_text(json.dumps(more))

    async def says_so() -> bool:
        return await sample(server.metrics_port, "corolla_kv_guaranteed_pages", state="missing") == 3 * num_pages

    await until(says_so, 10)
    kept = await sample(server.metrics_port, "corolla_kv_guaranteed_pages", state="kept")
    assert num_pages - 2 < kept <= num_pages


async def test_a_file_that_makes_no_sense_ends_the_start_of_a_block_server(swarm: Swarm, tmp_path: Path) -> None:
    file = tmp_path / "quotas"
    file.write_text('{"default": {"guaranteed_tokens": 3}}')
    with pytest.raises(SettingsError, match=r"COROLLA_QUOTAS_FILE=.*default.*named"):
        await swarm.add_server("0:5", quotas_file=file)
