"""What one more hop costs a token, with a model that does next to nothing.

    python -m benchmarks.hops --rounds 9

Four tiny blocks whose hidden states are as long as the demo model's are held by one to four servers. All chains run
side by side and take turns; in each round a line is laid through the times per token: its slope is a hop's cost. As
many processes that only pass messages of the same size on show what of it is the transport's: gRPC, framed streams
over TCP, and over TLS.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_most, figure
from benchmarks.forwarder import FRAMED, GRPC, Forwarders
from corolla.trust.workload import Role
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint
from tests.identities import Identities

_PROMPT_TOKENS = 8
_MESSAGE_BYTES = 2500
TINY_SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most-hops", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    hops = range(1, options.most_hops + 1)
    prompt = random_ids(_PROMPT_TOKENS, VOCAB_SIZE, seed=0)

    cpu_us: dict[Chain, list[float]] = {}

    def microseconds(chain: Chain) -> float:
        before_s = chain.cpu_s()
        timing = chain.answer(prompt, options.tokens)
        cpu_us.setdefault(chain, []).append(1e6 * (chain.cpu_s() - before_s) / options.tokens)
        return 1e6 / timing.tokens_per_s

    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory())) / "nothing"
        make_tiny_checkpoint("llama", folder, num_blocks=options.most_hops, config_changes=TINY_SHAPE)
        chains = {f"{count}": exits.enter_context(Chain(folder, count)) for count in hops}
        sides = {name: partial(microseconds, chain) for name, chain in chains.items()}
        identities = Identities(Path(exits.enter_context(tempfile.TemporaryDirectory())))
        certificate = str(identities.folder_of(Role.BLOCK, "1"))
        transports = {"gRPC": GRPC, "TCP": FRAMED, "TLS": certificate}
        rows = {
            (name, count): exits.enter_context(Forwarders(count, transport))
            for name, transport in transports.items()
            for count in hops
        }
        bare = {
            f"{name} {count}": partial(row.round_trip_us, _MESSAGE_BYTES, options.tokens)
            for (name, count), row in rows.items()
        }
        found = interleaved({**sides, **bare}, options.rounds)
    times_us = {name: found[name] for name in sides}
    for name, rounds in times_us.items():
        yield figure(f"a token of nothing, {name} hops", "us", rounds)
    yield figure("one more hop, a token of nothing", "us", _slopes(list(times_us.values())), at_most(250))
    for name in transports:
        alone = _slopes([found[f"{name} {count}"] for count in hops])
        yield figure(f"one more hop, a stream of {name} alone", "us", alone)
    # The first round warmed up.
    yield figure("one more hop, a token of nothing, processor time", "us",
                 _slopes([cpu_us[chain][1:] for chain in chains.values()]))  # fmt: skip


def _slopes(rounds_by_hops: list[list[float]]) -> list[float]:
    """The slope of a line through the times with 1, 2, ... hops, round by round."""
    hops = range(1, len(rounds_by_hops) + 1)
    return [float(np.polyfit(hops, each, 1)[0]) for each in zip(*rounds_by_hops, strict=True)]


if __name__ == "__main__":
    run(__doc__, add_options, measure)
