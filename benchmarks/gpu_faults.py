"""What callers see when a server dies in mid-answer, and how fast a leaving server hands its sessions over."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.chain import Chain
from benchmarks.figures import Figure, at_least, at_most, figure
from benchmarks.gpu_suite import Suite, percent_equal
from benchmarks.random_llama import SHAPES
from benchmarks.timing import Timing
from corolla.local.processes import ManagedProcess
from corolla.wire.span import Span
from corolla.wire.tensors import DTYPES
from tests.integration.metrics import sample
from tests.integration.waiting import until

_NUM_STREAMS: Final = 8
# An answer is long enough for something to happen in its middle.
_LEAST_TOKENS: Final = 256
_MOST_GAP_MS: Final = 100.0
_NUM_HELD_SESSIONS: Final = 4
_HELD_GIB: Final = 8.0
_HELD_GIB_OF_TINY: Final = 1 / 512
_MOST_HANDOVER_S: Final = 10.0
# The part of the pages that conversations may take; the streams beside them need the rest.
_SHARE_OF_PAGES: Final = 0.85


def kills(suite: Suite) -> Iterator[Figure]:
    """kill -9 of a server of the last hop in mid-answer, again and again: texts, and the longest time without a token.

    After each kill the server is started again, except after the last one.
    """
    (chain, replicas), tokens = suite.replicas(), max(suite.options.tokens, _LEAST_TOKENS)
    prompts = suite.prompts(_NUM_STREAMS)
    # The second answers find the beginning of their prompts cached, as those that are disturbed do.
    chain.answers(prompts, tokens)
    undisturbed = chain.answers(prompts, tokens)
    yield figure("longest gap between tokens, nothing killed", "ms", [_longest_gap_ms(undisturbed)])
    shares, gaps_ms = [], []
    for _ in range(suite.options.kills):
        suite.start_again(chain)
        killed_s, answers = chain.run(_answers_with_a_kill(chain, replicas, prompts, tokens))
        if not any(each.num_recoveries for each in answers):
            raise RuntimeError("the killed server had no session of these answers")
        shares.append(percent_equal(answers, undisturbed))
        gaps_ms.append(_longest_gap_ms(answers, killed_s))
    yield figure(f"answers with a server killed equal to undisturbed ones, {len(shares)} kills", "%", [min(shares)],
                 at_least(100.0))  # fmt: skip
    yield figure("longest gap between tokens, by kill", "ms", gaps_ms)
    yield figure(f"largest of these gaps, {len(gaps_ms)} kills", "ms", [max(gaps_ms)], at_most(_MOST_GAP_MS))


def handover(suite: Suite) -> Iterator[Figure]:
    """A server that holds conversations of many tokens gets SIGTERM beside streams, and hands all over to a spare."""
    (chain, replicas), tokens = suite.replicas(), max(suite.options.tokens, _LEAST_TOKENS)
    leaving, spare = _let_one_serve(chain, replicas)
    prompts = suite.prompts(_NUM_STREAMS)
    chain.answers(prompts, tokens)
    undisturbed = chain.answers(prompts, tokens)
    conversations = [suite.prompts(1, _held_tokens(suite, chain, leaving))[0] for _ in range(_NUM_HELD_SESSIONS)]
    sessions = [chain.client.session() for _ in conversations]
    chain.run(_fill(sessions, conversations))
    suite.start_again(chain)
    since_s, taken_s, answers = chain.run(_answers_during_a_drain(chain, leaving, prompts, tokens))
    left = _sessions_left(leaving)
    if left:
        raise RuntimeError(f"{left} sessions were not handed over")
    moved_gib = asyncio.run(sample(spare.metrics_port, "corolla_handover_bytes_total", direction="in")) / 2**30
    if not moved_gib:
        raise RuntimeError("the spare was given no keys and values")
    for session in sessions:
        chain.run(session.delete())
    name = f"{moved_gib:.3g} GiB handed over beside {_NUM_STREAMS} streams"
    yield figure(name, "s", [taken_s], at_most(_MOST_HANDOVER_S * moved_gib / _HELD_GIB))
    shares = [percent_equal(each, undisturbed) for each in answers]
    yield figure("answers beside a handover equal to undisturbed ones", "%", [min(shares)], at_least(100.0))
    gaps_ms = [_longest_gap_ms(each, since_s, since_s + taken_s) for each in answers]
    yield figure("longest gap between tokens beside a handover", "ms", [max(gaps_ms)])


async def _answers_with_a_kill(
    chain: Chain, replicas: Sequence[ManagedProcess], prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, list[Timing]]:
    """Kills the busier one of two servers of the same blocks once a quarter of each answer has come.

    Returns:
        When the server was killed, and the answers.
    """
    stamps: list[list[float]] = [[] for _ in prompts]
    tasks = [
        asyncio.create_task(chain.timed(prompt, tokens, each)) for prompt, each in zip(prompts, stamps, strict=True)
    ]

    async def is_in_mid_answer() -> bool:
        return any(task.done() for task in tasks) or all(len(each) >= tokens // 4 for each in stamps)

    await until(is_in_mid_answer)
    statuses = await asyncio.gather(*(asyncio.to_thread(chain.status, server) for server in replicas))
    victim = max(zip(statuses, replicas, strict=True), key=lambda pair: pair[0].num_running_sessions)[1]
    killed_s = time.perf_counter()
    chain.kill(victim)
    return killed_s, list(await asyncio.gather(*tasks))


async def _answers_during_a_drain(
    chain: Chain, leaving: ManagedProcess, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, float, list[list[Timing]]]:
    """Asks the prompts again and again until a server that was told to leave has handed all of its sessions over.

    Returns:
        When the server was told to leave, how many seconds its drain took, and all answers, time after time.
    """
    is_over = asyncio.Event()
    is_under_way = asyncio.Event()
    found: list[list[Timing]] = []

    async def ask() -> None:
        while not is_over.is_set():
            stamps: list[list[float]] = [[] for _ in prompts]
            calls = zip(prompts, stamps, strict=True)
            asked = asyncio.gather(*(chain.timed(prompt, tokens, each) for prompt, each in calls))

            async def is_running(
                asked: asyncio.Future[list[Timing]] = asked, stamps: list[list[float]] = stamps
            ) -> bool:
                return asked.done() or all(stamps)

            await until(is_running)
            is_under_way.set()
            found.append(list(await asked))

    asking = asyncio.create_task(ask())
    # A failure of the answers must end the wait, too.
    asking.add_done_callback(lambda _: is_under_way.set())
    await is_under_way.wait()
    since_s = time.perf_counter()
    chain.kill(leaving, signal.SIGTERM)
    await asyncio.to_thread(
        chain.until, lambda: _sessions_left(leaving) is not None or asking.done(), f"the drain of {leaving.name}"
    )
    taken_s = time.perf_counter() - since_s
    is_over.set()
    await asking
    return since_s, taken_s, found


async def _fill(sessions: Sequence[Any], prompts: Sequence[Sequence[int]]) -> None:
    calls = zip(sessions, prompts, strict=True)
    await asyncio.gather(
        *(session.generate(list(prompt), max_tokens=1, ignore_eos=True, temperature=0) for session, prompt in calls)
    )


def _let_one_serve(chain: Chain, replicas: Sequence[ManagedProcess]) -> tuple[ManagedProcess, ManagedProcess]:
    """Lets one of two servers of the same blocks take all sessions. Returns it, and the other one, which has ended."""
    spare = next((each for each in replicas if not chain.is_alive(each)), replicas[-1])
    if chain.is_alive(spare):
        chain.kill(spare)
    chain.until(lambda: not chain.is_placed(spare), f"the loss of {spare.name}")
    return next(each for each in replicas if each is not spare), spare


def _held_tokens(suite: Suite, chain: Chain, leaving: ManagedProcess) -> int:
    """The tokens of each conversation, so that the hop holds the wanted size of keys and values, if it has room."""
    options, shape = suite.options, SHAPES[suite.options.size]
    held_gib = options.handover_gib or (_HELD_GIB_OF_TINY if options.size == "tiny" else _HELD_GIB)
    head_size = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    num_blocks = len(Span.parse(leaving.blocks))
    token_bytes = 2 * num_blocks * shape["num_key_value_heads"] * head_size * DTYPES[options.dtype].itemsize
    status = chain.status(leaving)
    room = int(_SHARE_OF_PAGES * status.num_free_pages * status.page_tokens)
    longest = int(shape["max_position_embeddings"]) - 64
    return min(int(held_gib * 2**30 / token_bytes), room, longest * _NUM_HELD_SESSIONS) // _NUM_HELD_SESSIONS


def _sessions_left(server: ManagedProcess) -> int | None:
    """How many sessions a server that has drained could not hand over; None while it still drains."""
    for line in reversed(server.log.last_lines(100)):
        if '"drained"' in line:
            return int(json.loads(line)["sessions_left"])
    return None


def _longest_gap_ms(answers: Sequence[Timing], since_s: float = 0.0, until_s: float = float("inf")) -> float:
    return 1e3 * max(each.longest_gap_s(since_s, until_s) for each in answers)
