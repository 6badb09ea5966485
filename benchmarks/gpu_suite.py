"""What callers of a chain on one device see, part by part. Parts that need the same servers share one chain."""

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch

from benchmarks.chain import Chain
from benchmarks.command import random_ids
from benchmarks.figures import Figure, at_least, at_most, figure, ratio
from benchmarks.random_llama import stored_bytes, write_checkpoint
from benchmarks.timing import Timing
from corolla.chassis.processors import available_cores
from corolla.local.processes import ManagedProcess
from corolla.models.checkpoint import Checkpoint
from corolla.wire.tensors import DTYPES

_SAMPLED: Final[Mapping[str, Any]] = {
    "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.1, "seed": 1,
}  # fmt: skip
# Tokens per second of 8B in bfloat16 on one H100, with prompts of 128 tokens.
_STEADY: Final = {1: 150.0, 8: 1050.0, 32: 3600.0, 64: 6000.0}
_WITH_PROMPTS: Final = {64: 4500.0}
_FIRST_TOKEN_MS: Final = {512: 30.0, 2048: 90.0, 8000: 350.0}
_READY_S: Final = 12.0
_LEAST_STAGE_S: Final = 0.5
PROMPT_TOKENS: Final = 128
_PATIENCE_S: Final = 120.0
# A server's driver and libraries, recorded steps, tensors of a step, adapters.
_OVERHEAD_MIB: Final = 4096
_LEAST_CACHE_MIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Servers:
    """The block servers of a chain on the device.

    Attributes:
        name: for the names of figures.
        count: how many there are at the start, one for each hop.
        most: how many there may be later, with a spare.
        in_four_bits: whether they hold the packed checkpoint.
    """

    name: str
    count: int
    most: int
    in_four_bits: bool = False


ONE: Final = Servers("one server", 1, 1)
TWO: Final = Servers("two servers", 2, 3)
FOUR_BITS: Final = Servers("one server in 4 bits", 1, 1, in_four_bits=True)


class Suite:
    """A model on a device, and the chain that serves it at the moment: the device has room for one at a time.

    Args:
        folder: the model's checkpoint.
        options: of `benchmarks.gpu`.
        weight_bytes: what one token reads.
        bandwidth: bytes per second of a large copy, read and written.

    Attributes:
        starts_s: how many seconds block servers took from their process to their readiness, by what was started.
        stages_s: how many seconds each stage of the slowest such start took, by what was started.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, weight_bytes: int, bandwidth: float) -> None:
        self.folder = folder
        self.options = options
        self.weight_bytes = weight_bytes
        self.bandwidth = bandwidth
        self.starts_s: dict[str, list[float]] = {}
        self.stages_s: dict[str, dict[str, float]] = {}
        self._vocab_size = Checkpoint.from_pretrained(str(folder)).vocab_size
        self._seeds = itertools.count()
        self._exits = contextlib.ExitStack()
        self._running: tuple[Servers, Chain] | None = None
        self._timings: dict[tuple[Servers, int], list[list[Timing]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the chain that runs."""
        self._running = None
        self._exits.close()

    def chain(self, servers: Servers) -> Chain:
        """The chain of these servers. It is started, and another one ended, unless it runs already."""
        if self._running is not None and self._running[0] == servers:
            return self._running[1]
        self.close()
        options, folder = self.options, self.folder
        is_on_gpu = options.device.startswith("cuda")
        if servers.in_four_bits:
            folder = self.folder.with_name(f"{self.folder.name}-4-bits")
            if not folder.exists():
                write_checkpoint(folder, options.size, DTYPES[options.dtype], options.device, in_four_bits=True)
        chain = Chain(
            folder,
            servers.count,
            dtype=options.dtype,
            quantization="packed" if servers.in_four_bits else options.quantization,
            num_threads=max(1, available_cores() // servers.most) if is_on_gpu else 1,
            environment={
                "COROLLA_DEVICE": options.device,
                "COROLLA_KV_CACHE_MIB": str(cache_mib(options, folder, servers.most, servers.most / servers.count)),
                "COROLLA_PAGE_TOKENS": str(options.page_tokens),
                "COROLLA_LOG_FORMAT": "json",
                # A server of a cluster has as much time or more to hand its sessions over.
                "COROLLA_GRACE_S": "60",
                # Processors do not bound a GPU's microbatches.
                **({"COROLLA_MAX_MICROBATCHES": "0"} if is_on_gpu else {}),
            },
            # Parts that end servers start them again when they need them.
            restarts=False,
            logs=options.logs and options.logs / servers.name.replace(" ", "-"),
            patience_s=_PATIENCE_S,
        )
        self._exits.enter_context(chain)
        self._running = servers, chain
        for server in chain.servers:
            self._note_start(servers.name, chain, server)
        return chain

    def replicas(self) -> tuple[Chain, tuple[ManagedProcess, ManagedProcess]]:
        """The chain of two servers, and the two servers of its last hop's blocks, which may have ended."""
        chain = self.chain(TWO)
        if len(chain.servers) == TWO.count:
            spare = chain.add_replica(chain.servers[-1])
            self._note_start("a spare beside two servers", chain, spare)
        return chain, (chain.servers[-2], chain.servers[-1])

    def start_again(self, chain: Chain) -> None:
        """Starts the servers of a chain that have ended, and waits for them."""
        dead = [server for server in chain.servers if not chain.is_alive(server)]
        for server in dead:
            chain.launch(server)
        for server in dead:
            chain.until_ready(server)
            self._note_start("started again beside others", chain, server)

    def _note_start(self, name: str, chain: Chain, server: ManagedProcess) -> None:
        starts_s = self.starts_s.setdefault(name, [])
        starts_s.append(chain.ready_s[server.name])
        if starts_s[-1] == max(starts_s):
            self.stages_s[name] = chain.stages_s(server)

    def prompts(self, count: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
        """Prompts that nothing has seen before, and that begin like no other."""
        return [random_ids(num_tokens, self._vocab_size, next(self._seeds)) for _ in range(count)]

    def timings(self, servers: Servers, count: int) -> list[list[Timing]]:
        """Answers to so many new prompts at once, round by round after one to warm up. They are measured once."""
        if (servers, count) not in self._timings:
            chain, tokens = self.chain(servers), self.options.tokens
            rounds = [chain.answers(self.prompts(count), tokens) for _ in range(self.options.rounds + 1)]
            self._timings[servers, count] = rounds[1:]
        return self._timings[servers, count]

    def tokens_s(self, servers: Servers, count: int) -> list[float]:
        """Seconds of a token of one of so many streams, round by round."""
        return [token_s(each) for each in self.timings(servers, count)]


def cache_mib(options: argparse.Namespace, folder: Path, num_servers: int, copies: float = 1.0) -> int:
    """The memory for keys and values of each of the block servers that are about to share the device, in MiB.

    Args:
        copies: how many times the servers hold the model in all.

    Returns:
        0 where a server shall take what its device has left, or the usual memory of a CPU.
    """
    if options.kv_cache_mib or num_servers == 1 or not options.device.startswith("cuda"):
        return int(options.kv_cache_mib)
    free_bytes, _ = torch.cuda.mem_get_info(torch.device(options.device))
    rest_mib = (0.97 * free_bytes - copies * stored_bytes(folder)) / (1 << 20)
    return max(_LEAST_CACHE_MIB, int(rest_mib / num_servers) - _OVERHEAD_MIB)


def streams(suite: Suite) -> Iterator[Figure]:
    """Tokens per second once all prompts are in, and with the time of the prompts."""
    for count in suite.options.streams:
        rounds = suite.timings(ONE, count)
        steady = [count / token_s(timings) for timings in rounds]
        target = at_least(_STEADY[count]) if count in _STEADY else None
        yield figure(f"{count} streams, steady", "tokens/s", steady, target)
        used = [each / count * suite.weight_bytes / suite.bandwidth for each in steady]
        yield figure(f"{count} streams, fraction of the bandwidth roofline", "", used)
        target = at_least(_WITH_PROMPTS[count]) if count in _WITH_PROMPTS else None
        yield figure(f"{count} streams with their prompts", "tokens/s", map(_tokens_per_s, rounds), target)


def first_token(suite: Suite) -> Iterator[Figure]:
    """Milliseconds to the first token of a prompt."""
    chain = suite.chain(ONE)
    for length in suite.options.prompts:
        rounds = [
            chain.answer(suite.prompts(1, length)[0], 1).first_token_s * 1e3 for _ in range(suite.options.rounds + 1)
        ]
        target = at_most(_FIRST_TOKEN_MS[length]) if length in _FIRST_TOKEN_MS else None
        yield figure(f"first token of {length}", "ms", rounds[1:], target)


def long_row(suite: Suite) -> Iterator[Figure]:
    """A token of one stream that holds many tokens, beside one that holds few."""
    chain = suite.chain(ONE)
    most = suite.options.long_row or (512 if suite.options.size == "tiny" else 30_000)
    # After the first round the pages of the long prompt are cached.
    prompts = {length: suite.prompts(1, length) for length in (PROMPT_TOKENS, most)}
    found: dict[int, list[float]] = {length: [] for length in prompts}
    for _ in range(suite.options.rounds + 1):
        for length, prompt in prompts.items():
            found[length].append(token_s(chain.answers(prompt, suite.options.tokens)))
    for length, rounds in found.items():
        yield figure(f"a token of one stream that holds {length}", "ms", [each * 1e3 for each in rounds[1:]])
    yield ratio(f"a token with {most} held / {PROMPT_TOKENS}", found[most][1:], found[PROMPT_TOKENS][1:], at_most(1.2))


def sampled(suite: Suite) -> Iterator[Figure]:
    """Drawn tokens with penalties beside greedy ones."""
    chain, count = suite.chain(ONE), max(suite.options.streams)
    speeds: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for _ in range(suite.options.rounds + 1):
        for name, options in (("greedy", {"temperature": 0}), ("sampled", _SAMPLED)):
            timings = chain.answers(suite.prompts(count), suite.options.tokens, **options)
            speeds[name].append(_tokens_per_s(timings))
    yield ratio(f"{count} streams sampled / greedy", speeds["sampled"][1:], speeds["greedy"][1:], at_least(0.95))


def hops(suite: Suite) -> Iterator[Figure]:
    """Two servers on the device beside one, for one stream and for eight."""
    # All figures of one server come first, so that each chain is started once.
    found = {(servers, count): suite.tokens_s(servers, count) for servers in (ONE, TWO) for count in (1, 8)}
    for count, bound in ((1, 0.94), (8, 0.9)):
        yield ratio(f"two servers / one, {count} streams", found[ONE, count], found[TWO, count], at_least(bound))
    added = [(two - one) * 1e3 for one, two in zip(found[ONE, 1], found[TWO, 1], strict=True)]
    yield figure("one more hop adds to a token", "ms", added, at_most(0.5))


def company(suite: Suite) -> Iterator[Figure]:
    """How many of eight answers asked at once are what each is alone, in per cent."""
    chain, prompts, tokens = suite.chain(TWO), suite.prompts(8), suite.options.tokens
    alone = [chain.answer(prompt, tokens) for prompt in prompts]
    shares = [percent_equal(chain.answers(prompts, tokens), alone) for _ in range(suite.options.rounds)]
    yield figure("answers in company equal to those alone", "%", shares, at_least(100.0))


def four_bits(suite: Suite) -> Iterator[Figure]:
    """One stream with weights that stay packed in four bits, beside weights in the dtype."""
    plain, packed = suite.tokens_s(ONE, 1), suite.tokens_s(FOUR_BITS, 1)
    yield figure("1 streams in 4 bits, steady", "tokens/s", [1 / each for each in packed])
    yield ratio(f"1 streams in 4 bits / {suite.options.dtype}", plain, packed, at_least(1.8))


def ready(suite: Suite) -> Iterator[Figure]:
    """Seconds from a block server's process to its readiness, of all servers that other parts have started.

    Kernels that no earlier start on this machine has compiled are compiled meanwhile. Weights are in the page cache.
    """
    if not suite.starts_s:
        suite.chain(ONE)
    for name, starts_s in suite.starts_s.items():
        yield figure(f"ready, {name}", "s", starts_s, at_most(_READY_S))
        for stage, seconds in suite.stages_s[name].items():
            if seconds >= _LEAST_STAGE_S:
                yield figure(f"ready, {name}, slowest: {stage}", "s", [seconds])


def token_s(timings: Sequence[Timing]) -> float:
    """Seconds of a token in the later half of an answer, when all prompts are in: the median of the answers.

    Where the later half arrived in one message, as in a rehearsal, it is a token's share of the whole answer.
    """
    found = []
    for each in timings:
        half = each.stamps_s[len(each.stamps_s) // 2 - 1 :]
        taken_s = half[-1] - half[0]
        found.append(taken_s / (len(half) - 1) if taken_s else each.total_s / len(each.stamps_s))
    return statistics.median(found)


def percent_equal(found: Sequence[Timing], expected: Sequence[Timing]) -> float:
    """How many answers have the tokens of the expected ones, in per cent."""
    equal = sum(one.token_ids == other.token_ids for one, other in zip(found, expected, strict=True))
    return 100 * equal / len(expected)


def _tokens_per_s(timings: Sequence[Timing]) -> float:
    """All tokens over the time from the first request to the last token."""
    began_s, ended_s = min(each.started_s for each in timings), max(each.stamps_s[-1] for each in timings)
    return sum(len(each.stamps_s) for each in timings) / (ended_s - began_s)
