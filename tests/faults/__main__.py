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
from typing import Final

from corolla.chassis.heap import settle
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

Row = Callable[[Stand, random.Random, int], Awaitable[int]]

# Those that take longest come first, so that `all` leaves no long one for the end of those that run side by side.
ROWS: dict[str, tuple[Row, int, str]] = {
    "kill": (kill, 100, "kill -9 of each hop at a random token"),
    "adapters": (adapters, 100, "adapters loaded, unloaded and taken out under traffic, and kill -9 of each hop"),
    "cut": (cut, 21, "each wire of the swarm cut, in one direction or both"),
    "redis": (control_plane, 7, "Redis frozen, flushed, restarted, away, full; the router restarted, away"),
    "freeze": (freeze, 4, "SIGSTOP of a hop for ten seconds"),
    "cancel": (cancel, 500, "callers that leave"),
    "tasks": (tasks, 8, "an essential task fails"),
    "places": (places, 10, "a server dies at each named place of its work"),
    "forms": (forms, 12, "kill -9 of each hop while answers have to fit schemas, and calls their tools"),
    "drain": (drain, 1, "rolling drain of every server under 16 streams"),
    "client": (client_service, 6, "kill -9 of a client service; its callers go on at another one"),
    "herd": (herd, 2, "one of two replicas dies with 64 live sessions"),
    "library": (library, 14, "kill -9 of each hop while `generate` of transformers runs"),
    "soak": (soak, 3, "a fault every 20 seconds"),
}
# Half a second is judged, which the processes that another row starts may take.
_ALONE: Final = frozenset({"drain"})
# Its relays have addresses that no certificate names.
_IN_THE_CLEAR: Final = frozenset({"cut"})
# Drafts are always as long as they may be: they are what is to be wrong at times.
_SETTINGS: Final = {"adapters": ADAPTER_SETTINGS, "forms": {"COROLLA_ADAPTIVE_DRAFTS": "false"}}
# A soak that is short tells nothing that the others do not.
_LONG: Final = frozenset({"soak"})


async def run(row: str, model: str, spans: str, seed: int, num_runs: int, outage_s: float) -> int:
    work, _, what = ROWS[row]
    say(f"==> {what}: {num_runs} runs on {model} as {spans}, seed {seed}")
    is_secure = row not in _IN_THE_CLEAR
    async with standing(model, spans, _SETTINGS.get(row), outage_s=outage_s, is_secure=is_secure) as stand:
        # The callers are here: what was imported took the collector half a second, in which no token could arrive.
        settle()
        with PAUSES.watched():
            return await work(stand, random.Random(seed), num_runs)


async def run_all(arguments: Sequence[str], num_jobs: int) -> int:
    """Each row in a process and on a stack of its own, `num_jobs` at a time. Says what a row said when it ends."""
    together = [row for row in ROWS if row not in _ALONE | _LONG]
    statuses: list[int] = []

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
            say(output.decode(errors="replace") + f"{row} ended with {statuses[-1]}"
                f" after {time.monotonic() - started_s:.0f} s\n")  # fmt: skip

    async with asyncio.TaskGroup() as jobs:
        for _ in range(num_jobs):
            jobs.create_task(run_rows(together))
    await run_rows(sorted(_ALONE))
    return int(any(statuses))


def main() -> int:
    parser = argparse.ArgumentParser(prog="corolla-faults", description=(__doc__ or "").partition("\n\n")[0])
    rows = "; ".join(f"{name}: {what}" for name, (_, _, what) in ROWS.items())
    parser.add_argument("row", choices=[*ROWS, "all"], help=f"{rows}; all: every one but `soak`")
    parser.add_argument("--jobs", type=int, default=1, help="of `all`: rows at a time, each on a stack of its own")
    parser.add_argument("--runs", type=int, default=0, help="how often; each row has a default")
    parser.add_argument("--at-most", type=int, default=0, metavar="RUNS", help="fewer, where a row's default is more")
    parser.add_argument("--minutes", type=float, default=0, help="of `soak`, instead of `--runs`")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    parser.add_argument("--model", default="tiny", help="checkpoint folder, `demo`, or a random `tiny` one")
    parser.add_argument("--spans", default=TINY_SPANS, help="one block server for each; every span twice")
    parser.add_argument("--outage", type=float, help="seconds that Redis or the router stays away: 60, in `all` 15")
    given = parser.parse_args()
    outage_s = given.outage or (15.0 if given.row == "all" else 60.0)
    num_runs = given.runs or round(3 * given.minutes)
    if given.row != "all":
        default_runs = ROWS[given.row][1]
        num_runs = num_runs or min(default_runs, given.at_most or default_runs)
        return asyncio.run(run(given.row, given.model, given.spans, given.seed, num_runs, outage_s))
    passed_on = {
        "runs": num_runs,
        "at-most": given.at_most,
        "seed": given.seed,
        "model": given.model,
        "spans": given.spans,
        "outage": outage_s,
    }
    return asyncio.run(run_all([f"--{name}={value}" for name, value in passed_on.items()], max(1, given.jobs)))


if __name__ == "__main__":
    sys.exit(main())
