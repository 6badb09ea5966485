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
    """What a failed test logged is shown with its facts, as services show it."""
    logging_plugin = session.config.pluginmanager.get_plugin("logging-plugin")
    if logging_plugin is not None:
        logging_plugin.report_handler.setFormatter(TextFormatter())
