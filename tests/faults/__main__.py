"""corolla-faults: breaks a running stack and checks what must hold.

    python -m tests.faults kill --runs 100 --seed 1
    python -m tests.faults all

The exit status is 0 only if every figure held.
"""

import argparse
import asyncio
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from corolla.chassis.heap import settle
from tests import durations
from tests.faults.adapters import ENVIRONMENT as ADAPTER_SETTINGS
from tests.faults.adapters import adapters
from tests.faults.cancel import cancel
from tests.faults.churn import churn
from tests.faults.client_service import client_service
from tests.faults.control_plane import control_plane
from tests.faults.cut import cut
from tests.faults.drain import drain
from tests.faults.figures import say
from tests.faults.forms import forms
from tests.faults.freeze import freeze
from tests.faults.herd import herd
from tests.faults.kill import kill
from tests.faults.library import library
from tests.faults.pauses import PAUSES
from tests.faults.places import places
from tests.faults.running_stack import TINY_SPANS, RunningStack, start_stack
from tests.faults.soak import soak
from tests.faults.takeover import takeover
from tests.faults.tasks import tasks

Row = Callable[[RunningStack, random.Random, range], Awaitable[int]]

# What breaks, how often it is broken, how often a run of the gate breaks it, and what that is. Four or five runs of the
# gate in a row break it in every way that it has.
ROWS: dict[str, tuple[Row, int, int, str]] = {
    "kill": (kill, 100, 3, "kill -9 of each hop at a random token"),
    "adapters": (adapters, 100, 3, "adapters loaded, unloaded and taken out under traffic, and kill -9 of each hop"),
    "cut": (cut, 21, 4, "each wire of the swarm cut, in one direction or both"),
    "redis": (control_plane, 7, 2, "Redis frozen, flushed, restarted, away, full; the router restarted, away"),
    "freeze": (freeze, 4, 1, "SIGSTOP of a hop for ten seconds"),
    "cancel": (cancel, 500, 25, "callers that leave"),
    "tasks": (tasks, 9, 3, "an essential task fails"),
    "places": (places, 10, 3, "a server dies at each named place of its work"),
    "forms": (forms, 12, 3, "kill -9 of each hop while answers have to fit schemas, and calls their tools"),
    "churn": (churn, 50, 2, "servers leave and join again, a third of them by kill -9, under 8 streams"),
    "drain": (drain, 1, 1, "rolling drain of every server under 16 streams"),
    "client": (client_service, 6, 2, "kill -9 of a client service; its callers go on at another one"),
    "herd": (herd, 2, 1, "one of two replicas dies with 64 live sessions"),
    "takeover": (takeover, 10, 1, "kill -9 of all servers of a span whose weights another one keeps"),
    "library": (library, 14, 4, "kill -9 of each hop while `generate` of transformers runs"),
    "soak": (soak, 3, 0, "a fault every 20 seconds"),
}
# Half a second is judged, which the processes that another row starts may take.
_ALONE: Final = frozenset({"drain"})
# Its relays have addresses that no certificate names.
_IN_THE_CLEAR: Final = frozenset({"cut"})
# Drafts are always as long as they may be: they are what is to be wrong at times.
_SETTINGS: Final = {"adapters": ADAPTER_SETTINGS, "forms": {"COROLLA_ADAPTIVE_DRAFTS": "false"}}
# A stack takes as long to start as some rows take. The rows that add a client service come last: they leave sessions on
# servers, which end with their leases.
_ON_ONE_STACK: Final = (
    ("redis", "places", "herd", "cancel", "tasks"),
    ("freeze", "kill", "churn", "takeover", "library", "client"),
)
_ENDED: Final = re.compile(r"^(\w+) ended with \d+ after (\d+) s$", re.MULTILINE)
# A soak that is short tells nothing that the others do not.
_LONG: Final = frozenset({"soak"})


async def run_together(
    rows: Sequence[str],
    model: str,
    spans: str,
    seed: int,
    runs_of: Callable[[str], range],
    outage_s: float,
    context: int,
) -> int:
    """Does rows that need the same settings, one after the other, on one stack. Returns the exit status."""
    status, is_secure = 0, rows[0] not in _IN_THE_CLEAR
    settings = _SETTINGS.get(rows[0])
    async with start_stack(model, spans, settings, outage_s=outage_s, context=context, is_secure=is_secure) as stack:
        # The callers are here: what was imported took the collector half a second, in which no token could arrive.
        settle()
        for row in rows:
            (work, _, _, what), runs, started_s = ROWS[row], runs_of(row), time.monotonic()
            say(f"==> {what}: {len(runs)} runs from number {runs.start} on {model} as {spans}, seed {seed}")
            # Each row draws its own questions: servers still hold pages of the questions of the row before.
            with PAUSES.watched():
                row_status = await work(stack, random.Random(f"{row} {seed}"), runs)
            status |= row_status
            say(f"{row} ended with {row_status} after {time.monotonic() - started_s:.0f} s\n")
    return status


async def run_all(arguments: Sequence[str], num_jobs: int) -> tuple[int, dict[str, float]]:
    """Does all rows but the soak, `num_jobs` stacks at a time, each in a process whose output is shown at its end.

    Rows judge half seconds, which other stacks may take. So a process that fails is run a second time, alone, and then
    decides, unless another one has failed, too.

    Returns:
        The exit status, and the seconds that each row took.
    """
    shared = {row for rows in _ON_ONE_STACK for row in rows}
    # A wire is cut for longer than all rows of a shared stack take: what begins last is short.
    groups = [*((row,) for row in ROWS if row not in shared | _ALONE | _LONG), *_ON_ONE_STACK]
    failed: list[tuple[str, ...]] = []
    took_s: dict[str, float] = {}

    async def run_groups(waiting: list[tuple[str, ...]]) -> None:
        while waiting:
            rows = waiting.pop(0)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.faults", *rows, *arguments,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
            said = output.decode(errors="replace")
            took_s.update((row, float(seconds)) for row, seconds in _ENDED.findall(said))
            say(said + f"{' '.join(rows)}: the process ended with {process.returncode}\n")
            if process.returncode:
                failed.append(rows)

    async with asyncio.TaskGroup() as jobs:
        for _ in range(num_jobs):
            jobs.create_task(run_groups(groups))
    await run_groups([(row,) for row in sorted(_ALONE)])
    if len(failed) == 1:
        again = [failed.pop()]
        say(f"==> {' '.join(again[0])} failed: once more, alone")
        await run_groups(again)
    return int(bool(failed)), took_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="corolla-faults", description=(__doc__ or "").partition("\n\n")[0])
    rows = "; ".join(f"{name}: {what}" for name, (_, _, _, what) in ROWS.items())
    parser.add_argument(
        "rows", nargs="+", choices=[*ROWS, "all"], metavar="ROW",
        help=f"{rows}; all: every one but `soak`. Several rows share a stack",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="of `all`: stacks at a time")
    parser.add_argument("--runs", type=int, default=0, help="how often; each row has a default")
    parser.add_argument(
        "--turn", type=int, metavar="N", help="the few runs of the gate, beginning where the N-th turn is"
    )
    parser.add_argument("--minutes", type=float, default=0, help="of `soak`, instead of `--runs`")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    parser.add_argument("--model", default="tiny", help="checkpoint folder, `demo`, or a random `tiny` one")
    parser.add_argument("--spans", default=TINY_SPANS, help="one block server for each; every span twice")
    parser.add_argument("--outage", type=float, help="seconds that Redis or the router stays away: 60, in `all` 15")
    parser.add_argument(
        "--context", type=int, default=0, metavar="N",
        help="of `kill`, `cut`, `freeze` and `drain`: tokens of each prompt; default: a few words",
    )  # fmt: skip
    parser.add_argument("--record-durations", type=Path, metavar="FILE", help="of `all`: writes how long each row took")
    given = parser.parse_args()
    is_all = "all" in given.rows
    if not is_all and len({(row in _IN_THE_CLEAR, row if row in _SETTINGS else "") for row in given.rows}) > 1:
        parser.error("these rows need stacks of different settings; give one of them, or all")
    outage_s = given.outage or (15.0 if is_all else 60.0)
    num_runs = given.runs or round(3 * given.minutes)

    def runs_of(row: str) -> range:
        _, default_runs, few_runs, _ = ROWS[row]
        count = num_runs or (default_runs if given.turn is None else few_runs)
        first = 0 if given.turn is None else given.turn * count
        return range(first, first + count)

    if not is_all:
        return asyncio.run(
            run_together(given.rows, given.model, given.spans, given.seed, runs_of, outage_s, given.context)
        )
    passed_on = {
        "runs": num_runs, "seed": given.seed, "model": given.model, "spans": given.spans, "outage": outage_s,
        "context": given.context,
        **({} if given.turn is None else {"turn": given.turn}),
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in passed_on.items()]
    status, took_s = asyncio.run(run_all(arguments, max(1, given.jobs)))
    if given.record_durations:
        modules = {f"{ROWS[row][0].__module__.replace('.', '/')}.py": {"quick": took_s[row]} for row in took_s}
        durations.record(given.record_durations, modules)
    return status


if __name__ == "__main__":
    sys.exit(main())
