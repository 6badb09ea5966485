"""What distance costs: hops whose links hold back every byte for a while.

    python -m benchmarks.distance --hops 4 --delay 10

A chain of a model that does next to nothing, behind relays. Tokens go round, so each crosses as many links as there are
hops. If the caller sent each step, it would cross one more: from the last hop to the caller, and back to the first one.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.command import progress, random_ids, run
from benchmarks.distant_chain import DistantChain
from benchmarks.figures import Figure, at_most, figure
from benchmarks.relay import Relay
from corolla.local.ports import Ports
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint

_PROMPT_TOKENS = 8
_MESSAGE_BYTES = 500
_NUM_PROBES = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hops", type=int, default=4)
    parser.add_argument("--delay", type=float, default=10, help="milliseconds of a link, in each direction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    num_hops = options.hops
    spans = [f"{number}:{number + 1}" for number in range(num_hops)]
    times_ms: dict[float, list[float]] = {0.0: [], options.delay: []}
    links_ms: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_checkpoint("llama", Path(name) / "nothing", num_blocks=num_hops)
        with DistantChain(model, spans, {}) as chain:
            # The first round warms up.
            for number in range(options.rounds + 1):
                progress(f"round {number} of {options.rounds}")
                links_ms.append(asyncio.run(_link_ms(options.delay)))
                for delay_ms, times in times_ms.items():
                    chain.set_delay(delay_ms)
                    prompt = random_ids(_PROMPT_TOKENS, VOCAB_SIZE, seed=number)
                    answer = chain.generate(prompt, max_tokens=options.tokens, ignore_eos=True)
                    if number:
                        times.append(1000 / answer.usage.tokens_per_s)
    near_ms, far_ms = times_ms.values()
    yield figure(f"a link of {options.delay:g} ms, as the relay lays it", "ms", links_ms)
    yield figure(f"a token, {num_hops} hops, no delay", "ms", near_ms)
    yield figure(f"a token, {num_hops} hops, links of {options.delay:g} ms", "ms", far_ms)
    # What one more link would make of it, with everything else as it is.
    sent_by_caller_ms = [near + (num_hops + 1) * link for near, link in zip(near_ms, links_ms[1:], strict=True)]
    ratios = [far / other for far, other in zip(far_ms, sent_by_caller_ms, strict=True)]
    yield figure("likewise, over a token whose steps the caller sends", "x", ratios, at_most(0.82))


async def _link_ms(delay_ms: float) -> float:
    """How long a link really holds back what crosses it: event loops round waits up to whole milliseconds."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(_NUM_PROBES):
            writer.write(await reader.readexactly(_MESSAGE_BYTES))
        writer.close()

    free = Ports()
    far, near = (f"127.0.0.1:{free.free()}" for _ in range(2))
    relay = Relay()
    relay.delay_s = delay_ms / 1000
    await relay.listen(near, far)
    async with await asyncio.start_server(echo, *far.split(":")):
        reader, writer = await asyncio.open_connection(*near.split(":"))
        times_ms = []
        for _ in range(_NUM_PROBES):
            began_s = time.perf_counter()
            writer.write(b"-" * _MESSAGE_BYTES)
            await reader.readexactly(_MESSAGE_BYTES)
            times_ms.append(1000 * (time.perf_counter() - began_s))
        writer.close()
    return statistics.median(times_ms) / 2


if __name__ == "__main__":
    run(__doc__, add_options, measure)
