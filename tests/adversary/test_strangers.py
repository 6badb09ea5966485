"""A thousand strangers at a port, before they have shown anything: others' answers go on, and memory stays."""

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from benchmarks.figures import percentile
from corolla.sdk.async_client import AsyncClient
from tests.adversary.strangers import KINDS, TLS
from tests.faults.running_stack import RunningStack, start_stack

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]

NUM_STRANGERS = 1000
ARRIVAL_S = 10.0
CUT_OFF_S = 30.0
"""A handshake may take ten seconds; keepalive asks after ten, and waits for five."""
MOST_MIB = 256
UNNOTICED_S = 0.02
NUM_TRIES = 3
"""The machine may have been another's in one of the two times."""
NUM_STREAMS = 4
KEY = "0123456789abcdef"

HALF_HANDSHAKES = ("half_handshake", "half_hello", "silent")
CALLERS = tuple(each for each in KINDS if each not in HALF_HANDSHAKES)


@dataclass
class Listener:
    """A caller with a key, who asks one thing after the other.

    Attributes:
        waits_s: between tokens.
    """

    client: AsyncClient
    waits_s: list[float] = field(default_factory=list)

    async def listen(self) -> None:
        while True:
            last_s = math.nan
            async for chunk in self.client.stream("the thin man", max_tokens=2000, ignore_eos=True):
                now_s = time.monotonic()
                self.waits_s += [] if math.isnan(last_s) else [now_s - last_s]
                last_s = now_s if chunk.token_ids else last_s
                # Callers read; a model of this size would otherwise keep both cores busy.
                await asyncio.sleep(0.005)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningStack]:
    keys: Path = tmp_path_factory.mktemp("strangers") / "keys"
    await asyncio.to_thread(keys.write_text, f"quiet:{KEY}\n")
    async with start_stack("tiny", "0:6", {"COROLLA_API_KEYS_FILE": str(keys)}, is_shared=True) as stack:
        yield stack


def percentile_s(listeners: list[Listener]) -> float:
    """The 99th of the waits since it was last asked for."""
    waits_s = [wait_s for each in listeners for wait_s in each.waits_s]
    for each in listeners:
        each.waits_s.clear()
    return percentile(waits_s, 99)


@pytest.mark.parametrize(
    "port, kinds",
    [
        ("client", CALLERS), ("client", ("bomb",)), ("client", HALF_HANDSHAKES), ("router", HALF_HANDSHAKES),
        ("data", HALF_HANDSHAKES), ("control", HALF_HANDSHAKES), ("issuer", HALF_HANDSHAKES),
        ("issuer", CALLERS),
    ],
    ids=[
        "client-mixed", "client-bombs", "client-handshakes", "router", "data", "control", "issuer-handshakes",
        "issuer-mixed",
    ],
)  # fmt: skip
async def test_a_crowd_of_strangers_disturbs_nobody(stack: RunningStack, port: str, kinds: tuple[str, ...]) -> None:
    (server,) = stack.servers
    addresses = {
        "client": stack.service.address, "router": stack.process("router").address,
        "data": server.address, "control": server.control_address, "issuer": stack.process("issuer").address,
    }  # fmt: skip
    if port == "issuer" and kinds == CALLERS:
        addresses[port] = f"{TLS}{addresses[port]}"  # where everybody gets past the handshake
    pid = stack.local.pid(port if port in ("client", "router", "issuer") else server.name)
    assert pid is not None
    for _ in range(NUM_TRIES):
        figures = await disturbed_by(stack, pid, addresses[port], kinds)
        assert figures.num_mib < MOST_MIB
        if figures.disturbed_s < max(2 * figures.usual_s, UNNOTICED_S):
            break
    else:
        pytest.fail(f"others wait for their tokens: {figures}")


@dataclass(frozen=True)
class Figures:
    """What one run measured: growth of a process, and the 99th percentile of waits before the crowd and during it."""

    num_mib: float
    usual_s: float
    disturbed_s: float


async def disturbed_by(stack: RunningStack, pid: int, address: str, kinds: tuple[str, ...]) -> Figures:
    """Streams go on, and the crowd is cut off."""
    process = psutil.Process(pid)
    async with AsyncClient(stack.service.address, api_key=KEY) as client:
        listeners = [Listener(client) for _ in range(NUM_STREAMS)]
        listening = [asyncio.create_task(each.listen()) for each in listeners]
        await asyncio.sleep(1)
        percentile_s(listeners)
        await asyncio.sleep(ARRIVAL_S)
        usual_s = percentile_s(listeners)
        before = largest = process.memory_info().rss
        crowd = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.adversary.strangers",
            address, ",".join(kinds), str(NUM_STRANGERS), str(ARRIVAL_S),
        )  # fmt: skip
        try:
            end_s = time.monotonic() + ARRIVAL_S
            while time.monotonic() < end_s:
                await asyncio.sleep(0.05)
                largest = max(largest, process.memory_info().rss)
            disturbed_s = percentile_s(listeners)
            async with asyncio.timeout(CUT_OFF_S):
                assert await crowd.wait() == 0
        finally:
            if crowd.returncode is None:
                crowd.kill()
        assert not any(task.done() for task in listening)
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
    return Figures((largest - before) / (1 << 20), usual_s, disturbed_s)
