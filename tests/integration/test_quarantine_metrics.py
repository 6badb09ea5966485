"""Metrics show which servers a client service leaves out, and why."""

from pathlib import Path

from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until


async def test_quarantines_are_counted_by_cause(tmp_path: Path) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny", num_blocks=4)
    async with Swarm(tmp_path, model, ["0:4", "0:4"]) as swarm:
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
