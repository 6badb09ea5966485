"""Process environment of all tests and their servers; OpenMP and MKL read it once, when torch is imported."""

import os
import signal

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

from corolla.chassis.logs import TextFormatter
from tests.patience import outlast_pauses

# How long an example takes says more of the machine than of the code.
# The same examples in each run, so that what passed here passes there; `--hypothesis-profile=explore` draws others.
hypothesis.settings.register_profile("corolla", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("corolla")

# A shell's background jobs ignore SIGINT, and so would every server and command that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

outlast_pauses()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Shows the log lines of a failed test in the services' own format."""
    logging_plugin = session.config.pluginmanager.get_plugin("logging-plugin")
    if logging_plugin is not None:
        logging_plugin.report_handler.setFormatter(TextFormatter())


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where all seeds of the simulation held, they must have taken nearly all transitions of a session on a hop."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
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
