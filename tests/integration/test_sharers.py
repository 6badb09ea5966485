"""Many sessions with one beginning: its pages count once, and a loss does not change that."""

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_runner import plant_fault
from tests.integration.gates import hand_over
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.reference import Unsplit

PAGE_TOKENS, NUM_SHARED, NUM_SHARERS = 16, 21, 64
BEGINNING = random.Random(5).choices(range(4, 256), k=NUM_SHARED * PAGE_TOKENS)
LAST_TOKENS = range(4, 7)
SETTINGS = {"page_tokens": PAGE_TOKENS, "kv_cache_mib": 2}
OPTIONS: dict[str, Any] = {"max_tokens": 31, "ignore_eos": True}


@pytest.mark.full
async def test_all_who_share_a_beginning_have_room_and_recover(tmp_path: Path, model: Path) -> None:
    """After the loss, only one of them at a time has room for pages of its own."""
    unsplit = Unsplit(model)
    truths = {
        last: tuple(unsplit.generate([*BEGINNING, last], OPTIONS["max_tokens"], ignore_eos=True).token_ids)
        for last in LAST_TOKENS
    }
    async with Swarm(tmp_path, model, ["0:3", "3:5"], server=SETTINGS) as swarm, swarm.connect() as client:
        await client.generate(BEGINNING, max_tokens=1, ignore_eos=True)
        victim, are_open = swarm.servers[1], threading.Event()
        restore = plant_fault(victim.engine.runner, before=lambda rows: are_open.wait(0.5))
        lasts = [LAST_TOKENS[number % len(LAST_TOKENS)] for number in range(NUM_SHARERS)]
        asked = [asyncio.create_task(client.generate([*BEGINNING, last], **OPTIONS)) for last in lasts]
        await until(lambda: all(len(server.sessions) == NUM_SHARERS for server in swarm.servers), 120)
        (first, _) = await swarm.statuses()
        assert first.num_free_pages == NUM_SHARED, "pages for one session's copies, and too few for a scratch session"
        restore()
        are_open.set()
        await swarm.add_server("3:5")
        await swarm.crash(victim)
        answers = await asyncio.gather(*asked)
        assert [each.token_ids for each in answers] == [truths[last] for last in lasts]
        swarm.servers.remove(victim)
        await swarm.until_empty()
        await victim.stop()


@pytest.mark.full
async def test_sharers_move_to_a_server_that_holds_their_beginning_once(tmp_path: Path, model: Path) -> None:
    """It has room for the whole texts of ten of them."""
    options, num_sharers, num_with_room = {**OPTIONS, "max_tokens": 60}, 32, 10
    settings = {**SETTINGS, "grace_s": 60.0}
    async with Swarm(tmp_path, model, ["0:3", "3:5"], server=settings) as swarm, swarm.connect() as client:
        undisturbed = [await client.generate([*BEGINNING, last], **options) for last in LAST_TOKENS]
        plant_fault(swarm.servers[1].engine.runner, before=lambda rows: time.sleep(0.03))
        lasts = [number % len(LAST_TOKENS) for number in range(num_sharers)]
        asked = [asyncio.create_task(client.generate([*BEGINNING, LAST_TOKENS[last]], **options)) for last in lasts]
        await hand_over(swarm, 1, len(BEGINNING), num_sessions=num_sharers)
        answers = await asyncio.gather(*asked)
        (_, taker) = await swarm.statuses()
        assert taker.num_pages // -(-(len(BEGINNING) + 1 + options["max_tokens"]) // PAGE_TOKENS) <= num_with_room
        assert [each.token_ids for each in answers] == [undisturbed[last].token_ids for last in lasts]
        num_moved = sum(each.usage.recoveries for each in answers)
        assert num_moved > num_with_room
        assert not await sample(swarm.clients[0].metrics_port, "corolla_recomputed_tokens_total")
