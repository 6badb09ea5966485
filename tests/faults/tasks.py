"""An essential task fails: the process says NOT_SERVING and ends within a second, and not a token changes."""

import asyncio
import contextlib
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, get_args

import grpc
from grpc_health.v1 import health_pb2

from corolla.chassis import failpoints
from corolla.chassis.failpoints import EssentialTask
from corolla.chassis.lifecycle import EXIT_FAILED
from corolla.local.log_files import LogFile
from corolla.local.processes import ManagedProcess
from corolla.sdk.async_client import AsyncClient
from corolla.wire.network import Network
from tests.faults.figures import Figures, say
from tests.faults.pauses import PAUSES
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, Repertoire, listen
from tests.faults.takeover import without_blocks

MAX_STALL_S = 2.0
MAX_END_S = 1.0
_NUM_TRIES = 2
_NUM_QUESTIONS = 8
_NUM_STREAMS = 4
_GIVE_UP_S = 60.0
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# In which kind of process a task runs, and the least and the most times that it goes on before it fails; counted from
# when somebody watches the health of the process, but for `moves`, which waits for an order after its first time.
TASKS: Final[dict[EssentialTask, tuple[str, int, int]]] = {
    "moves": ("server", 1, 1), "heartbeats": ("server", 6, 16), "engine": ("server", 40, 400),
    "periodic_tasks": ("server", 2, 5), "placement_statistics": ("router", 10, 60), "rebalancing": ("router", 3, 12),
    "placement_feed": ("router", 5, 40), "http": ("client", 5, 40), "placement_watch": ("client", 3, 8),
}  # fmt: skip


async def tasks(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """In each run streams follow each other until the next essential task has ended its process."""
    missing = set(get_args(EssentialTask)) - TASKS.keys()
    if missing:
        raise LookupError(f"no process is known for {missing}")
    figures = Figures()
    questions = [Question.draw(rng, rng.randint(1, 20), rng.randint(32, 96)) for _ in range(_NUM_QUESTIONS)]
    second = await stack.add_service()
    ends_s = []
    with tempfile.TemporaryDirectory(prefix="corolla-faults-") as folder:
        async with AsyncClient(second.address) as other:
            repertoire = Repertoire(other)
            await repertoire.undisturbed(questions)
            for number in runs:
                figures.num_runs += 1
                task = list(TASKS)[number % len(TASKS)]
                end_s = math.inf
                for attempt in range(_NUM_TRIES):
                    is_watched = Path(folder, f"watched-{number}-{attempt}")
                    took_s = await _run(stack, rng, figures, repertoire, questions, task, is_watched, other)
                    # A process that lingers does so each time; one that had no processor need not.
                    if (end_s := min(end_s, took_s)) <= MAX_END_S:
                        break
                figures.check(end_s <= MAX_END_S, f"the process ended {end_s:.2f} s after its task {task}")
                ends_s.append(end_s)
    say(f"from the failure to the end of the process: longest {max(ends_s):.2f} s; limit {MAX_END_S:.1f} s")
    return figures.conclude(MAX_STALL_S)


async def _run(
    stack: RunningStack,
    rng: random.Random,
    figures: Figures,
    repertoire: Repertoire,
    questions: Sequence[Question],
    task: EssentialTask,
    is_watched: Path,
    other: AsyncClient,
) -> float:
    kind, least, most = TASKS[task]
    victim = rng.choice(stack.servers) if kind == "server" else stack.process(kind)
    stack.kill(victim)
    await stack.until_gone(victim)
    armed = without_blocks(victim) if task == "moves" else victim
    when = f"fail:{task}:{rng.randint(least, most)}"
    stack.local.launch(armed, {failpoints.VARIABLE: when if task == "moves" else f"{when}@{is_watched}"})
    await stack.until_started(armed)
    started_s = time.monotonic()
    asked = AsyncClient(victim.address) if kind == "client" else other
    answers: list[Answer] = []

    async def ask_on(rng: random.Random) -> None:
        while stack.local.pid(victim.name) is not None and time.monotonic() < started_s + _GIVE_UP_S:
            answer, name = Answer(rng.choice(questions)), f"{rng.getrandbits(128):032x}"
            await listen(asked, answer, request_id=name)
            if kind != "client" or answer.failure is None:
                answers.append(answer)
            elif answer.token_ids:
                # What its client service began, another one ends.
                await listen(other, answer, request_id=name, resume_from=list(answer.token_ids))
                answers.append(answer)

    network = Network() if kind == "client" else stack.local.operator
    watching = asyncio.create_task(_statuses(network, victim.rpc_address, is_watched.touch))
    ending = asyncio.create_task(_seconds_to_end(stack, armed))
    if kind == "client":
        await stack.until_serving(victim)
    await asyncio.gather(*(ask_on(random.Random(rng.random())) for _ in range(_NUM_STREAMS)))
    if outlived := stack.local.pid(victim.name) is not None:
        stack.kill(victim)
    figures.check(not outlived, f"the process outlived its task {task}")
    end_s, how = await ending
    figures.check(f"status {EXIT_FAILED}" in how, f"the process {how}")
    statuses = await watching
    figures.check(statuses[-1:] == [_NOT_SERVING], f"health's last words were {statuses[-2:]}")
    undisturbed = await repertoire.undisturbed([answer.question for answer in answers])
    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.compare(expected, figures)
    stalls = [answer.longest_wait_s(started_s) for answer in answers]
    figures.stalls_s += stalls
    say(f"run {figures.num_runs}: {victim.name} ended {end_s:.2f} s after its task {task}; {len(answers)} answers, "
        f"longest stall {max(stalls, default=0):.2f} s")  # fmt: skip
    if kind == "client":
        await asked.close()
    stack.local.launch(victim)
    await stack.until_serving(victim)
    await stack.until_whole(is_idle=False)
    return end_s


async def _seconds_to_end(stack: RunningStack, process: ManagedProcess) -> tuple[float, str]:
    """The seconds from the log line of the task's end to the end of the process; and how that ended, in words."""
    stack.forget_ends()
    log = LogFile(process.log.path)
    log.new_lines()  # those of earlier runs
    failed_s = math.inf
    is_over = False
    while not is_over:
        # Both are read before the log: whatever comes after counts.
        is_over, now_s = stack.local.pid(process.name) is None, time.monotonic()
        if any("essential task ended" in line for line in log.new_lines()):
            failed_s = now_s
        await asyncio.sleep(0.005)
    end_s = now_s - failed_s - PAUSES.num_seconds(failed_s) if failed_s < math.inf else math.inf
    return end_s, await stack.next_end()


async def _statuses(network: Network, address: str, on_status: Callable[[], None]) -> list[int]:
    """The states of health, from the first one until the process ends."""
    statuses: list[int] = []
    give_up_s = time.monotonic() + _GIVE_UP_S
    while not statuses and time.monotonic() < give_up_s:
        # A channel of its own for each try: the pauses of one that is tried again grow to seconds.
        async with network.open_channel(address) as channel:
            watch = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            with contextlib.suppress(grpc.RpcError):
                async for answer in watch(health_pb2.HealthCheckRequest(), timeout=_GIVE_UP_S):
                    statuses.append(answer.status)
                    on_status()
        await asyncio.sleep(0.02)
    return statuses
