"""One quiet tenant next to a crowd of another one's callers, who ask for all that there is and read slowly.

Processes of their own on this machine. Times are printed, as ratios of phases that take turns: they are the machine's.
The test asserts what holds on any machine: no request is refused within a guarantee, and no tenant has what is kept
for others.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median, quantiles

import pytest

from benchmarks.chain import Chain
from corolla.chassis.errors import CorollaError
from corolla.chassis.heap import settle
from corolla.sdk.async_client import AsyncClient
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint
from tests.integration.waiting import until

pytestmark = pytest.mark.full

log = logging.getLogger(__name__)

KEYS = {tenant: f"key-of-{tenant}-0123456789" for tenant in ("noisy", "quiet")}
NUM_CALLERS, NUM_COMPLETIONS, LONGEST = 200, 16, 8000
NUM_CONNECTIONS = 8
READ_INTERVAL_S = 0.5
NUM_PLACES, NUM_GUARANTEED = 256, 16
NUM_QUIET_STREAMS = 4
PROMPT_TOKENS, ANSWER_TOKENS = 32, 64
PHASE_S, NUM_ROUNDS = 8.0, int(os.environ.get("COROLLA_TEST_NOISY_ROUNDS", "1"))
_PATIENCE_S = 300


@dataclass
class Phase:
    """What the quiet tenant saw in one."""

    first_tokens_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0
    refusals: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


async def quiet_phase(chain: Chain) -> Phase:
    """One answer after the other, in several streams."""
    phase, prompts, started_s = Phase(), count(), time.perf_counter()

    async def ask(client: AsyncClient) -> None:
        while time.perf_counter() < started_s + PHASE_S:
            asked_s, number = time.perf_counter(), next(prompts)
            prompt = [1 + (7 * each + number) % (VOCAB_SIZE - 1) for each in range(PROMPT_TOKENS)]
            try:
                has_begun = False
                async for chunk in client.stream(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True):
                    if not has_begun:
                        phase.first_tokens_s.append(time.perf_counter() - asked_s)
                    has_begun = True
                    phase.num_tokens += len(chunk.token_ids)
            except CorollaError as refusal:
                phase.refusals.append(refusal.reason)

    async with AsyncClient(chain.client_address, api_key=KEYS["quiet"]) as client:
        await asyncio.gather(*(ask(client) for _ in range(NUM_QUIET_STREAMS)))
    phase.seconds = time.perf_counter() - started_s
    return phase


async def num_sessions(chain: Chain) -> list[int]:
    """The number of sessions on each hop."""
    return [each.num_sessions for each in await asyncio.to_thread(chain.server_statuses)]


@asynccontextmanager
async def crowd(chain: Chain) -> AsyncIterator[None]:
    """All callers of the noisy tenant, each with one request after the other."""

    async def ask(client: AsyncClient) -> None:
        while True:
            try:
                stream = client.stream([1, 2, 3], n=NUM_COMPLETIONS, max_tokens=LONGEST, ignore_eos=True)
                async for _ in stream:
                    await asyncio.sleep(READ_INTERVAL_S)
            except CorollaError:
                await asyncio.sleep(READ_INTERVAL_S)

    clients = [AsyncClient(chain.client_address, api_key=KEYS["noisy"]) for _ in range(NUM_CONNECTIONS)]
    callers = [asyncio.ensure_future(ask(clients[number % NUM_CONNECTIONS])) for number in range(NUM_CALLERS)]
    try:

        async def is_there() -> bool:
            return min(await num_sessions(chain)) >= NUM_PLACES // 2

        await until(is_there, _PATIENCE_S)
        yield
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        for client in clients:
            await client.close()


async def measured(chain: Chain) -> tuple[list[Phase], list[Phase], int]:
    """Phases alone, phases next to the crowd, and the most sessions that it had on a hop."""
    alone, crowded, most_sessions = [], [], 0

    async def is_empty() -> bool:
        return not any(await num_sessions(chain))

    await quiet_phase(chain)
    for _ in range(NUM_ROUNDS):
        alone.append(await quiet_phase(chain))
        async with crowd(chain):
            most_sessions = max(most_sessions, *await num_sessions(chain))
            crowded.append(await quiet_phase(chain))
        await until(is_empty, _PATIENCE_S)
    return alone, crowded, most_sessions


def p99_s(phases: Sequence[Phase]) -> float:
    return quantiles([each for phase in phases for each in phase.first_tokens_s], n=100)[-1]


def test_a_quiet_tenant_next_to_a_noisy_one(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(
        "llama", tmp_path / "tiny", num_blocks=2, config_changes={"max_position_embeddings": 16384}
    )
    (tmp_path / "keys").write_text("".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()))
    quotas = {"tenants": {"quiet": {"guaranteed_sequences": NUM_GUARANTEED, "guaranteed_tokens": 4096}}}
    (tmp_path / "quotas").write_text(json.dumps(quotas))
    environment = {
        "COROLLA_API_KEYS_FILE": str(tmp_path / "keys"),
        "COROLLA_QUOTAS_FILE": str(tmp_path / "quotas"),
        "COROLLA_MAX_RUNNING_REQUESTS": str(NUM_PLACES),
    }
    with Chain(model, 2, environment=environment) as chain:
        # All callers are in this process, which stops while the collector goes through what it imported.
        settle()
        alone, crowded, most_sessions = chain.run(measured(chain))
    first = [median(each for phase in phases for each in phase.first_tokens_s) for phases in (alone, crowded)]
    speed = [median(phase.tokens_per_s for phase in phases) for phases in (alone, crowded)]
    log.warning(
        f"first token, alone and next to the crowd: median {first[0] * 1e3:.1f} and {first[1] * 1e3:.1f} ms, "
        f"p99 {p99_s(alone) * 1e3:.1f} and {p99_s(crowded) * 1e3:.1f} ms ({p99_s(crowded) / p99_s(alone):.1f} times); "
        f"tokens/s {speed[0]:.0f} and {speed[1]:.0f} ({speed[1] / speed[0]:.2f})"
    )
    assert not [reason for phase in (*alone, *crowded) for reason in phase.refusals]
    assert all(phase.first_tokens_s for phase in crowded)
    assert NUM_PLACES // 2 <= most_sessions <= NUM_PLACES - NUM_GUARANTEED
