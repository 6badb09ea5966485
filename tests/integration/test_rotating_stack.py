"""Leaves and authority are replaced again and again under the answers of a stack of processes, and nothing recovers.

Certificates live for three periods only. `COROLLA_TEST_ROTATIONS` and `COROLLA_TEST_STREAMS` make it longer and wider:
20 rotations of 15 s are five minutes.
"""

import asyncio
import datetime
import os
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from corolla.chassis.errors import Unauthenticated
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import Usage
from corolla.trust import loopback
from corolla.trust.authority import Authority
from corolla.trust.workload import Role
from tests.checkpoints import make_tiny_checkpoint
from tests.faults.running_stack import NUM_BLOCKS, TINY_SPANS, RunningStack, start_stack
from tests.identities import Identities
from tests.reference import Sampling, Unsplit

NUM_ROTATIONS: Final = int(os.environ.get("COROLLA_TEST_ROTATIONS", "2"))
NUM_STREAMS: Final = int(os.environ.get("COROLLA_TEST_STREAMS", "4"))
PERIOD_S: Final = 15.0
LIFE: Final = datetime.timedelta(seconds=3 * PERIOD_S)
TAKEN_S: Final = 6.0
"""Every process has taken a change by then, and all that stands goes on with it."""
NUM_TOKENS: Final = 192
NUM_QUESTIONS: Final = 16
PAUSE_S: Final = 1.0
"""Between an answer and the next question of a caller: others have streams under way meanwhile."""
_SAMPLED: Final[Sampling] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


def question(number: int) -> tuple[list[int], Sampling]:
    """The question of a caller: greedy, or sampled with a seed."""
    return [1, 2, 3 + number % NUM_QUESTIONS], _SAMPLED if number % 4 == 3 else {}


def answers(model: Path) -> list[list[int]]:
    unsplit = Unsplit(model)
    return [
        unsplit.generate(prompt_ids, NUM_TOKENS, sampling, ignore_eos=True).token_ids
        for prompt_ids, sampling in map(question, range(NUM_QUESTIONS))
    ]


class Callers:
    """They ask for the same again and again.

    Attributes:
        longest_s: between a token and the next, since this was set to 0.
    """

    def __init__(self, expected: list[list[int]]) -> None:
        self._expected = expected
        self.is_over = False
        self.usages: list[Usage] = []
        self.longest_s = 0.0

    async def run(self, number: int, address: str) -> None:
        prompt_ids, sampling = question(number)
        async with AsyncClient(address) as client:
            while not self.is_over:
                token_ids: list[int] = []
                heard_s = 0.0
                async for chunk in client.stream(prompt_ids, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling):
                    if token_ids:
                        self.longest_s = max(self.longest_s, time.monotonic() - heard_s)
                    heard_s = time.monotonic()
                    token_ids += chunk.token_ids
                    self.usages += [chunk.usage] if chunk.usage is not None else []
                assert token_ids == self._expected[number % NUM_QUESTIONS]
                await asyncio.sleep(PAUSE_S)


def num_untrusted(stack: RunningStack) -> int:
    """Streams, watches and calls that any process has ended or lost since a certificate counted no longer."""
    return sum(each.log.path.read_text().count(Unauthenticated.reason) for each in stack.local.processes)


@pytest.mark.full
@pytest.mark.timeout(300 + NUM_ROTATIONS * PERIOD_S)
async def test_answers_go_on_while_all_certificates_are_replaced(tmp_path: Path) -> None:
    changes = {"max_position_embeddings": 8192}
    model = make_tiny_checkpoint("llama", tmp_path / "tiny", num_blocks=NUM_BLOCKS, config_changes=changes)
    callers = Callers(await asyncio.to_thread(answers, model))
    async with start_stack(str(model), TINY_SPANS) as stack:
        services = (stack.service, await stack.add_service())
        operator = loopback.tls_dir(stack.local.router_address, Role.OPERATOR)
        assert operator is not None
        identities, trusted = Identities.found_in(operator.parent), (operator / "ca.crt").read_bytes()
        waits: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(callers.run(number, services[number % 2].address))
            for _ in range(NUM_ROTATIONS):
                began_s, callers.longest_s, new = time.monotonic(), 0.0, Authority()
                identities.trust_pem(trusted, new.certificate_pem)
                await asyncio.sleep(TAKEN_S)
                identities.replace(new, datetime.datetime.now(datetime.UTC) + LIFE)
                await asyncio.sleep(TAKEN_S)
                # What still ran on old certificates ends now.
                identities.trust(new)
                trusted = new.certificate_pem
                await asyncio.sleep(began_s + PERIOD_S - time.monotonic())
                waits.append(f"{callers.longest_s:.2f}")
            callers.is_over = True
        num_recoveries = sum(usage.recoveries for usage in callers.usages)
        sys.stdout.write(
            f"\n{NUM_ROTATIONS} rotations, {NUM_STREAMS} streams, {len(callers.usages)} answers, {num_recoveries} "
            f"recoveries; longest wait between two tokens during each rotation, in seconds: {' '.join(waits)}\n"
        )
        assert len(callers.usages) >= NUM_STREAMS
        assert num_recoveries == num_untrusted(stack) == 0
