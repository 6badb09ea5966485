"""Each wire of a chain cut, in one direction or both: the streams go on elsewhere, and late bytes reach none."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from corolla.local.processes import LOOPBACK
from tests.faults.figures import Figures, say
from tests.faults.stand import Stand
from tests.faults.streams import Answer, Question, listen, until_tokens
from tests.faults.wires import Wires

MAX_STALL_S = 4.0
_CUT_S = 5.0
_MAX_TOKENS = 7000
# Another address of this machine: where the relays listen.
_RELAYED_HOST = "127.0.0.2"
_DIRECTIONS = ("in", "out", "both")


async def cut(stand: Stand, rng: random.Random, num_runs: int) -> int:
    """Of each run: two streams that outlast the cut of one wire of their chain, the first hop's, the next one's..."""
    figures = Figures()
    async with _relayed(stand) as wires:
        for number in range(num_runs):
            figures.num_runs += 1
            edge, direction = divmod(number, len(_DIRECTIONS))
            await _run(stand, rng, figures, wires, edge % (2 * len(stand.spans) - 1), _DIRECTIONS[direction])
    return figures.conclude(MAX_STALL_S)


async def _run(
    stand: Stand, rng: random.Random, figures: Figures, wires: Mapping[str, Wires], edge: int, direction: str
) -> None:
    answers = [Answer(Question.draw(rng, 4, _MAX_TOKENS)) for _ in range(2)]
    tasks = [asyncio.create_task(listen(stand.client, answer)) for answer in answers]
    await until_tokens(answers[0], rng.randint(2, 60), tasks[0])
    hops = [await stand.busiest(span) for span in stand.spans]
    # First the wires from the client service to each hop, then those from hop to hop.
    if edge < len(hops):
        source, target = stand.service, hops[edge]
    else:
        source, target = hops[edge - len(hops)], hops[edge - len(hops) + 1]
    recoveries_before = await stand.metric("corolla_session_recoveries_total")
    cut_s = time.monotonic()
    wires[target.name].cut(stand.stack.pid(source.name) or 0, direction)
    await asyncio.sleep(_CUT_S)
    num_tokens_cut = [len(answer.token_ids) for answer in answers]
    wires[target.name].mend()
    await asyncio.sleep(1.5)
    num_tokens = [len(answer.token_ids) for answer in answers]
    for answer, task, before, after in zip(answers, tasks, num_tokens_cut, num_tokens, strict=True):
        figures.check(task.done() or after > before, "a stream stands still after the wire was mended")
        figures.check(answer.failure is None, f"the caller got {type(answer.failure).__name__}: {answer.failure}")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await stand.until_whole()
    undisturbed = [
        Answer(Question(answer.question.prompt, len(answer.token_ids), answer.question.options)) for answer in answers
    ]
    await asyncio.gather(*(listen(stand.client, answer) for answer in undisturbed))
    for answer, expected in zip(answers, undisturbed, strict=True):
        figures.check(answer.token_ids == expected.token_ids, "the tokens are not those of the undisturbed answer")
    # From hop to hop nothing but signs of life comes back.
    if edge < len(hops) or direction != "out":
        num_recoveries = await stand.metric("corolla_session_recoveries_total") - recoveries_before
        figures.check(num_recoveries > 0, "the cut was not noticed")
    stalls = [answer.longest_wait_s(cut_s) for answer in answers]
    figures.stalls_s += stalls
    say(f"run {figures.num_runs}: {direction} cut between {source.name} and {target.name}; {num_tokens} tokens, "
        f"longest stall {max(stalls):.2f} s")  # fmt: skip


@asynccontextmanager
async def _relayed(stand: Stand) -> AsyncIterator[dict[str, Wires]]:
    """Every server started again under an address where a relay listens. Gives the relays by the servers' names."""
    wires: dict[str, Wires] = {}
    try:
        for server in stand.servers:
            stand.kill(server)
            await stand.until_gone(server)
            port = int(server.address.rpartition(":")[2])
            arguments = list(server.arguments)
            arguments[arguments.index("--advertised-host") + 1] = _RELAYED_HOST
            wires[server.name] = Wires(_RELAYED_HOST, LOOPBACK, port)
            await wires[server.name].start()
            stand.stack.launch(replace(server, arguments=tuple(arguments), address=f"{_RELAYED_HOST}:{port}"))
        await stand.until_whole()
        yield wires
    finally:
        for each in wires.values():
            each.mend()
            await each.close()
