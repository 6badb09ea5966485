"""Certificates and their authority are replaced while answers run: no caller notices, and nothing recovers."""

import asyncio
from pathlib import Path
from typing import Final

import pytest

from corolla.sdk.results import Usage
from corolla.trust.authority import Authority
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

NUM_STREAMS: Final = 6
NUM_TOKENS: Final = 96
TAKEN_S: Final = 5.0
"""Every process has taken a change by then, and all that stands goes on with it."""


class Callers:
    """They ask for one answer after the other, and know what it has to be."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.is_over = False
        self.usages: list[Usage] = []

    async def run(self, number: int) -> None:
        expected: list[int] | None = None
        while not self.is_over:
            async with self._swarm.connect(number % 2) as client:
                token_ids: list[int] = []
                async for chunk in client.stream([1, 2, 3 + number], max_tokens=NUM_TOKENS, ignore_eos=True):
                    token_ids += chunk.token_ids
                    self.usages += [chunk.usage] if chunk.usage is not None else []
            expected = expected or token_ids
            assert token_ids == expected
            assert len(token_ids) == NUM_TOKENS


@pytest.mark.full
async def test_answers_go_on_while_all_certificates_are_replaced(tmp_path: Path) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with Swarm(tmp_path, model, ["0:2", "2:5"], num_clients=2, is_encrypted=True) as swarm:
        identities, callers = swarm.identities, Callers(swarm)
        assert identities is not None

        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(callers.run(number))
            old, new = identities.authority, Authority()
            identities.trust(old, new)
            await asyncio.sleep(TAKEN_S)
            identities.replace(new)
            await asyncio.sleep(TAKEN_S)
            # What still ran on old certificates would end now.
            identities.trust(new)
            await asyncio.sleep(TAKEN_S)
            num_answers = len(callers.usages)

            async def is_served() -> bool:
                return len(callers.usages) >= num_answers + 2 * NUM_STREAMS

            await until(is_served, 60)
            callers.is_over = True
        assert sum(usage.recoveries for usage in callers.usages) == 0
