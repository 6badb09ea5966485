"""Rolling drain: every server gets SIGTERM in turn under 16 streams; no stream fails, and no token is recomputed."""

import asyncio
import random
import time

from benchmarks.figures import percentile
from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, listen

NUM_STREAMS = 16
MAX_STALL_S = 0.5
MAX_EXIT_S = 30.0


async def drain(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """In each run every server ends and comes back, one after the other, while streams follow each other."""
    figures = Figures()
    for _ in runs:
        figures.num_runs += 1
        await _run(stack, rng, figures)
    return figures.conclude(MAX_STALL_S, 95)


async def _run(stack: RunningStack, rng: random.Random, figures: Figures) -> None:
    questions = [
        Question.draw(rng, rng.randint(1, 20), rng.randint(200, 400), stack.context) for _ in range(NUM_STREAMS)
    ]
    undisturbed = [Answer(question) for question in questions]
    await asyncio.gather(*(listen(stack.client, answer) for answer in undisturbed))
    recomputed_before = await stack.metric("corolla_recomputed_tokens_total")
    is_over = asyncio.Event()
    streams = [asyncio.create_task(ask_again(stack, question, is_over)) for question in questions]
    drains: list[tuple[float, float]] = []
    for server in stack.servers:
        num_hit = (await stack.status(server)).num_running_sessions
        begun_s = time.monotonic()
        how, exit_s = await stack.end(server)
        drains.append((begun_s, begun_s + exit_s))
        figures.check(how == "ended with status 0", f"the server {how}")
        figures.check(exit_s <= MAX_EXIT_S, f"the server took {exit_s:.1f} s to end")
        say(f"run {figures.num_runs}: {server.name} of {server.blocks} ended after {exit_s:.2f} s; "
            f"it had {num_hit} sessions")  # fmt: skip
        await stack.restart(server, is_idle=False)
    is_over.set()
    num_moved = 0
    moves_s: list[float] = []
    for expected, answers in zip(undisturbed, await asyncio.gather(*streams), strict=True):
        for answer in answers:
            answer.compare(expected, figures)
            if answer.usage is not None and answer.usage.recoveries:
                num_moved += answer.usage.recoveries
                moves_s.append(answer.usage.stall_s / answer.usage.recoveries)
                # Between two drains a server starts, on the same cores.
                figures.stalls_s.append(max(answer.longest_wait_s(*drain) for drain in drains))
    num_recomputed = await stack.metric("corolla_recomputed_tokens_total") - recomputed_before
    figures.check(num_recomputed == 0, f"{num_recomputed:.0f} tokens were computed again")
    figures.check(num_moved > 0, "no stream was hit")
    # Tokens are late on a busy machine without any drain, too.
    move_s = percentile(moves_s or [0.0], 95)
    usual_s = percentile([answer.longest_wait_s(0) for answer in undisturbed], 95)
    say(f"run {figures.num_runs}: {num_moved} moves in {len(figures.stalls_s)} answers, "
        f"{num_recomputed:.0f} tokens recomputed, "
        f"a move took p95 {move_s:.3f} s, longest wait of undisturbed answers p95 {usual_s:.2f} s, "
        f"longest exit {max(ended - begun for begun, ended in drains):.2f} s")  # fmt: skip
    await stack.until_whole()


async def ask_again(stack: RunningStack, question: Question, is_over: asyncio.Event) -> list[Answer]:
    """The same question until it is over."""
    answers = []
    while not is_over.is_set():
        answers.append(Answer(question))
        await listen(stack.client, answers[-1])
        if answers[-1].failure is not None:
            break
    return answers
