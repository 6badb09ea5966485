"""`python -m corolla.block_server`: a block server, configured by `COROLLA_*` variables."""

import contextlib
import os
from typing import Any

from corolla.chassis.errors import SettingsError
from corolla.chassis.heap import uncollected_imports
from corolla.chassis.processors import OPENMP_WAITING


def run(**overrides: Any) -> int:
    """Runs a block server until a signal; `overrides` take precedence over the environment. Returns the exit status."""
    for name, value in OPENMP_WAITING.items():
        os.environ.setdefault(name, value)
    with uncollected_imports():
        from corolla.block_server.settings import BlockServerSettings
        from corolla.chassis.lifecycle import run_service
        from corolla.chassis.settings import load
        from corolla.compute.cuda_driver import begin_opening

        # `run_service` loads the settings again, and reports bad ones.
        with contextlib.suppress(SettingsError):
            begin_opening(load(BlockServerSettings, **overrides).device)
        from corolla.block_server.process import BlockServerProcess

    return run_service(BlockServerSettings, BlockServerProcess, **overrides)


if __name__ == "__main__":
    raise SystemExit(run())
