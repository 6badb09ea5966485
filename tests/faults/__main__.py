"""corolla-faults: breaks a running stack and checks what must hold.

    python -m tests.faults kill --runs 100 --seed 1
    python -m tests.faults all

One subcommand for each kind of fault; the exit status is 0 only if every figure held.
"""

import argparse
import asyncio
import random
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
from tests.faults.soak import soak
from tests.faults.stand import TINY_SPANS, Stand, standing
from tests.faults.tasks import tasks

Row = Callable[[Stand, random.Random, range], Awaitable[int]]

# What breaks, how often it is broken, how often a run of the gate breaks it, and what that is. Those that take longest
# come first, so that `all` leaves no long one for the end of those that run side by side.
ROWS: dict[str, tuple[Row, int, int, str]] = {
    "kill": (kill, 100, 5, "kill -9 of each hop at a random token"),
    "adapters": (adapters, 100, 5, "adapters loaded, unloaded and taken out under traffic, and kill -9 of each hop"),
    "cut": (cut, 21, 5, "each wire of the swarm cut, in one direction or both"),
    "redis": (control_plane, 7, 5, "Redis frozen, flushed, restarted, away, full; the router restarted, away"),
    "freeze": (freeze, 4, 2, "SIGSTOP of a hop for ten seconds"),
    "cancel": (cancel, 500, 50, "callers that leave"),
    "tasks": (tasks, 8, 5, "an essential task fails"),
    "places": (places, 10, 5, "a server dies at each named place of its work"),
    "forms": (forms, 12, 3, "kill -9 of each hop while answers have to fit schemas, and calls their tools"),
    "drain": (drain, 1, 1, "rolling drain of every server under 16 streams"),
    "client": (client_service, 6, 5, "kill -9 of a client service; its callers go on at another one"),
    "herd": (herd, 2, 1, "one of two replicas dies with 64 live sessions"),
    "library": (library, 14, 5, "kill -9 of each hop while `generate` of transformers runs"),
    "soak": (soak, 3, 0, "a fault every 20 seconds"),
}
# Half a second is judged, which the processes that another row starts may take.
_ALONE: Final = frozenset({"drain"})
# Its relays have addresses that no certificate names.
_IN_THE_CLEAR: Final = frozenset({"cut"})
# Drafts are always as long as they may be: they are what is to be wrong at times.
_SETTINGS: Final = {"adapters": ADAPTER_SETTINGS, "forms": {"COROLLA_ADAPTIVE_DRAFTS": "false"}}
# A soak that is short tells nothing that the others do not.
_LONG: Final = frozenset({"soak"})


async def run(row: str, model: str, spans: str, seed: int, runs: range, outage_s: float) -> int:
    work, _, _, what = ROWS[row]
    say(f"==> {what}: {len(runs)} runs from number {runs.start} on {model} as {spans}, seed {seed}")
    is_secure = row not in _IN_THE_CLEAR
    async with standing(model, spans, _SETTINGS.get(row), outage_s=outage_s, is_secure=is_secure) as stand:
        # The callers are here: what was imported took the collector half a second, in which no token could arrive.
        settle()
        with PAUSES.watched():
            return await work(stand, random.Random(seed), runs)


async def run_all(arguments: Sequence[str], num_jobs: int) -> tuple[int, dict[str, float]]:
    """Each row in a process and on a stack of its own, `num_jobs` at a time. Says what a row said when it ends.

    Returns:
        The exit status, and the seconds that each row took.
    """
    together = [row for row in ROWS if row not in _ALONE | _LONG]
    statuses: list[int] = []
    took_s: dict[str, float] = {}

    async def run_rows(waiting: list[str]) -> None:
        while waiting:
            row, started_s = waiting.pop(0), time.monotonic()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.faults", row, *arguments,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
            statuses.append(process.returncode or 0)
            took_s[row] = time.monotonic() - started_s
            say(output.decode(errors="replace") + f"{row} ended with {statuses[-1]} after {took_s[row]:.0f} s\n")

    async with asyncio.TaskGroup() as jobs:
        for _ in range(num_jobs):
            jobs.create_task(run_rows(together))
    await run_rows(sorted(_ALONE))
    return int(any(statuses)), took_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="corolla-faults", description=(__doc__ or "").partition("\n\n")[0])
    rows = "; ".join(f"{name}: {what}" for name, (_, _, _, what) in ROWS.items())
    parser.add_argument("row", choices=[*ROWS, "all"], help=f"{rows}; all: every one but `soak`")
    parser.add_argument("--jobs", type=int, default=1, help="of `all`: rows at a time, each on a stack of its own")
    parser.add_argument("--runs", type=int, default=0, help="how often; each row has a default")
    parser.add_argument(
        "--turn", type=int, metavar="N", help="the few runs of the gate, beginning where the N-th turn is"
    )
    parser.add_argument("--minutes", type=float, default=0, help="of `soak`, instead of `--runs`")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    parser.add_argument("--model", default="tiny", help="checkpoint folder, `demo`, or a random `tiny` one")
    parser.add_argument("--spans", default=TINY_SPANS, help="one block server for each; every span twice")
    parser.add_argument("--outage", type=float, help="seconds that Redis or the router stays away: 60, in `all` 15")
    parser.add_argument("--record-durations", type=Path, metavar="FILE", help="of `all`: writes how long each row took")
    given = parser.parse_args()
    outage_s = given.outage or (15.0 if given.row == "all" else 60.0)
    num_runs = given.runs or round(3 * given.minutes)
    if given.row != "all":
        _, default_runs, few_runs, _ = ROWS[given.row]
        num_runs = num_runs or (default_runs if given.turn is None else few_runs)
        first = 0 if given.turn is None else given.turn * num_runs
        runs = range(first, first + num_runs)
        return asyncio.run(run(given.row, given.model, given.spans, given.seed, runs, outage_s))
    passed_on = {
        "runs": num_runs,
        "seed": given.seed,
        "model": given.model,
        "spans": given.spans,
        "outage": outage_s,
        **({} if given.turn is None else {"turn": given.turn}),
    }
    arguments = [f"--{name}={value}" for name, value in passed_on.items()]
    status, took_s = asyncio.run(run_all(arguments, max(1, given.jobs)))
    if given.record_durations:
        modules = {f"{ROWS[row][0].__module__.replace('.', '/')}.py": {"quick": took_s[row]} for row in took_s}
        durations.record(given.record_durations, modules)
    return status


if __name__ == "__main__":
    sys.exit(main())
