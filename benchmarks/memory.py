"""Memory: of each process by its span, of a token's keys and values, and of sessions that do nothing.

    python -m benchmarks.memory --sessions 1000

Counted is what a process has of its own: the stack's processes are forked from one that imported torch, and share that.
Idle sessions belong to a tiny model whose pages are small; what their pages take is measured apart and taken off.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chain import Chain
from benchmarks.command import progress, random_ids, run
from benchmarks.figures import Figure, at_most, figure
from corolla.models.checkpoint import Checkpoint
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint

_KIB, _MIB = 1 << 10, 1 << 20
_CACHE_MIB = 512
_LONG_PROMPT_TOKENS = 2048
_MOST_AT_ONCE = 50
# Hops keep a session's pages for as long as its last lease says.
_LEASE_S = "3600"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--blocks", default="0:3,3:10,10:30", help="spans of unequal length")
    parser.add_argument("--sessions", type=int, default=1000, help="that do nothing")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    yield from _of_spans(options.model, options.blocks)
    yield from _of_idle_sessions(options.sessions)


def _of_spans(model: str, blocks: str) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(model)
    checkpoint.fetch()
    environment = {"COROLLA_KV_CACHE_MIB": str(_CACHE_MIB)}
    with Chain(model, blocks=blocks, environment=environment) as chain:
        chain.answer(random_ids(16, checkpoint.vocab_size, seed=0), 2)
        own = chain.resident_bytes()
        for name, span in chain.spans().items():
            yield figure(f"block server with blocks {span}, of its own", "MiB", [own[name] / _MIB])
        per_token = [_CACHE_MIB * _MIB / (each.num_pages * each.page_tokens) for each in chain.server_statuses()]
        yield figure("keys and values of a token, all blocks", "KiB", [sum(per_token) / _KIB])


def _of_idle_sessions(num_sessions: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_checkpoint("llama", Path(scratch) / "tiny", num_blocks=2)
        environment = {"COROLLA_KV_CACHE_MIB": "64", "COROLLA_LEASE_S": _LEASE_S}
        with Chain(folder, environment=environment) as chain:
            # What a process takes once, for its first sessions, is no session's.
            chain.run(_open_sessions(chain, num_sessions // 10, first_seed=0))
            before, pages_before = chain.resident_bytes(), _page_bytes_in_use(chain)
            chain.run(_open_sessions(chain, num_sessions, first_seed=num_sessions))
            after, pages_after = chain.resident_bytes(), _page_bytes_in_use(chain)
            held = min(status.num_sessions for status in chain.server_statuses())
        grown = {name: after[name] - before[name] for name in after}
        in_pages = pages_after - pages_before
        yield figure("idle sessions that block servers still hold", "", [held])
        for name, size in grown.items():
            yield figure(f"idle session, {name}", "KiB", [size / num_sessions / _KIB])
        yield figure("idle session, its pages", "KiB", [in_pages / num_sessions / _KIB])
        yield figure(
            "idle session, all processes, beyond its pages", "KiB",
            [(sum(grown.values()) - in_pages) / num_sessions / _KIB], at_most(64),
        )  # fmt: skip


async def _open_sessions(chain: Chain, count: int, first_seed: int) -> None:
    """Sessions that each had one short turn."""
    room = asyncio.Semaphore(_MOST_AT_ONCE)

    async def open_one(seed: int) -> None:
        async with room:
            session = await chain.client.create_session()
            await chain.timed(random_ids(8, VOCAB_SIZE, seed), 2, session=session.session_id)
            if seed % 100 == 0:
                progress(f"session {seed}")

    await asyncio.gather(*(open_one(first_seed + number) for number in range(count)))
    progress("")


def _page_bytes_in_use(chain: Chain) -> int:
    return sum(status.kv_cache_bytes for status in chain.server_statuses())


if __name__ == "__main__":
    run(__doc__, add_options, measure)
