"""The measurements of a row of faults, and whether they held."""

import sys
import time
from dataclasses import dataclass, field

from benchmarks.figures import percentile
from tests.faults.pauses import PAUSES


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass
class Figures:
    """Counts and durations of all runs of a row.

    Attributes:
        num_runs: runs so far.
        stalls_s: the longest wait for a token of each stream that was hit.
        failures: sentences about what did not hold.
        began_s: when the row began, by `time.monotonic()`.
    """

    num_runs: int = 0
    stalls_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.failures.append(f"run {self.num_runs}: {otherwise}")
            say(f"  FAILED {self.failures[-1]}")

    def conclude(self, max_stall_s: float, percent: float = 99) -> int:
        """Prints the figures; `max_stall_s` must hold for so many percent of the streams.

        Returns:
            The exit status: 0 only if everything held.
        """
        stalls = self.stalls_s
        if stalls:
            p50, p95, p99 = (percentile(stalls, each) for each in (50, 95, 99))
            say(f"stall of {len(stalls)} streams: p50 {p50:.2f} s, p95 {p95:.2f} s, p99 {p99:.2f} s, "
                f"longest {max(stalls):.2f} s; limit of p{percent} {max_stall_s:.1f} s")  # fmt: skip
            reached_s = percentile(stalls, percent)
            self.check(reached_s <= max_stall_s, f"the stall's p{percent} is {reached_s:.2f} s")
        if paused_s := PAUSES.num_seconds(self.began_s):
            say(f"this machine paused for {paused_s:.1f} s in all, which no wait includes")
        num_bad = len({failure.partition(":")[0] for failure in self.failures})
        say(f"{self.num_runs - num_bad} of {self.num_runs} runs held")
        return 1 if self.failures else 0
