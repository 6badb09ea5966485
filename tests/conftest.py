"""Process environment of all tests and their servers; OpenMP and MKL read it once, when torch is imported."""

import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Idle OpenMP threads that spin slow every neighbour process several times over.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise MKL rounds by where in memory operands happen to lie, and equality bit for bit would be a matter of luck.
os.environ.setdefault("MKL_CBWR", "AUTO")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test may fetch anything.
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.run_folder import run_folder

# What is kept of models is made anew in each run, and nothing of it stays.
os.environ["COROLLA_CACHE"] = str(run_folder() / "cache")

import hypothesis
import pytest

from corolla.chassis.heap import settle
from corolla.chassis.logs import TextFormatter
from tests import durations
from tests.patience import outlast_pauses
from tests.tiers import NUM_QUARTERS, outside_of_quarter

# How long an example takes says more of the machine than of the code.
# The same examples in each run, so that what passed here passes there; `--hypothesis-profile=explore` draws others.
hypothesis.settings.register_profile("corolla", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("corolla")

# A shell's background jobs ignore SIGINT, and so would every server and command that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

outlast_pauses()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("corolla")
    group.addoption(
        "--quarter", type=int, help="of the tests marked full, runs those of this quarter only: 0, 1, 2 or 3"
    )
    group.addoption("--record-durations", type=Path, metavar="FILE", help="writes how long each test file took")


def pytest_report_header(config: pytest.Config) -> str | None:
    quarter = config.getoption("quarter")
    return (
        f"of what is marked full: quarter {quarter % NUM_QUARTERS} of {NUM_QUARTERS}" if quarter is not None else None
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the other quarters out."""
    if (quarter := config.getoption("quarter")) is None:
        return
    outside = outside_of_quarter((each.nodeid for each in items if each.get_closest_marker("full")), quarter)
    config.hook.pytest_deselected(items=[each for each in items if each.nodeid in outside])
    items[:] = [each for each in items if each.nodeid not in outside]


def pytest_collection_finish() -> None:
    """Has the collector pass over all that was imported: going through it took an eighth of the tests' time."""
    settle()


_num_collections = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Some tests release what was passed over: each later collection of this process would take half a second.

    The collector counts what it passes over object by object, which takes longer than most tests. A release collects
    everything, so this asks only after such a collection.
    """
    global _num_collections
    if _num_collections == gc.get_stats()[-1]["collections"]:
        return
    if gc.get_freeze_count() == 0:
        settle()
    _num_collections = gc.get_stats()[-1]["collections"]


MOST_DESCRIPTORS = 300
_SECONDS: dict[str, durations.Seconds] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    durations.add(_SECONDS, report)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Shows the log lines of a failed test in the services' own format."""
    logging_plugin = session.config.pluginmanager.get_plugin("logging-plugin")
    if logging_plugin is not None:
        logging_plugin.report_handler.setFormatter(TextFormatter())


@pytest.fixture(scope="session", autouse=True)
def _few_descriptors() -> Iterator[None]:
    """A process of tests that holds more and more files open leaks them."""
    yield
    gc.unfreeze()
    gc.collect()
    held = [os.path.realpath(f"/dev/fd/{number}") for number in os.listdir("/dev/fd")]
    kinds = Counter(re.sub(r"\d+", "N", name) for name in held)
    assert len(held) < MOST_DESCRIPTORS, f"{len(held)} descriptors are open after all tests: {kinds.most_common(12)}"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where all seeds of the simulation held, they must have taken nearly all transitions of a session on a hop."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    if path := session.config.getoption("record_durations"):
        durations.record(path, _SECONDS)
    parts = [each for each in reporter.stats.get("passed", []) if "test_seeds_hold" in each.nodeid]
    if not parts:
        return
    from tests.simulation import transitions

    rest = transitions.of_parts(parts)
    if rest is None:
        return
    reporter.write_line(f"\ntransitions of a session on a hop that no seed took: {'; '.join(rest) or 'none'}")
    if len(rest) > transitions.MOST_NOT_TAKEN:
        reporter.write_line("these are too many", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
