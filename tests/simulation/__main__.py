"""Runs seeds of the simulation.

python -m tests.simulation --seeds 5000          all seeds from 0 on, in all processes that pay
python -m tests.simulation --seed 17             one seed, logged step by step
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from corolla.block_server.hop_session import SessionEvent, SessionState
from tests.simulation.run import Report, replay_command, run
from tests.simulation.transitions import in_words, not_taken


def main() -> int:
    parser = argparse.ArgumentParser(prog="corolla-simulation", description=(__doc__ or "").partition("\n\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="just this one, with all that happens")
    which.add_argument("--seeds", type=int, default=500, help="so many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args()
    if given.seed is not None:
        report = run(given.seed, _say)
        _tell(report)
        return 1 if report.broken else 0
    started = time.perf_counter()
    seeds = range(given.first, given.first + given.seeds)
    with ProcessPoolExecutor(given.jobs) as pool:
        reports = list(pool.map(run, seeds, chunksize=10))
    broken = [report for report in reports if report.broken]
    taken = sum((report.transitions for report in reports), Counter[tuple[SessionState, SessionEvent]]())
    for report in broken:
        _tell(report)
    _say(
        f"{len(reports)} seeds in {time.perf_counter() - started:.0f} s: {sum(r.num_tokens for r in reports)} tokens, "
        f"{sum(r.num_recoveries for r in reports)} recoveries, "
        f"{sum(r.num_late for r in reports)} of silent hops, {sum(r.num_used_standbys for r in reports)} at standbys "
        f"({sum(r.num_standbys for r in reports)} looked at), {sum(r.num_errors for r in reports)} typed errors, "
        f"{sum(r.num_lies for r in reports)} late frames refused; {len(broken)} broken"
    )
    _say(f"transitions of a session on a hop that none took: {'; '.join(not_taken(map(in_words, taken))) or 'none'}")
    return 1 if broken else 0


def _tell(report: Report) -> None:
    for line in report.broken:
        _say(f"seed {report.seed}: {line}")
    if report.broken:
        _say(f"replay: {replay_command(report.seed)}")
    else:
        _say(f"seed {report.seed} holds: {report.num_tokens} tokens in {report.seconds:.1f} s, "
             f"{report.num_recoveries} recoveries, {report.digest}")  # fmt: skip


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
