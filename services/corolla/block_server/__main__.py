"""`python -m corolla.block_server`: a block server, configured by `COROLLA_*` variables."""

import os
from typing import Any

from corolla.chassis.heap import uncollected_imports
from corolla.chassis.processors import OPENMP_WAITING


def run(**overrides: Any) -> int:
    """Runs a block server until a signal; `overrides` take precedence over the environment. Returns the exit status."""
    for name, value in OPENMP_WAITING.items():
        os.environ.setdefault(name, value)
    with uncollected_imports():
        from corolla.block_server.process import BlockServerProcess
        from corolla.block_server.settings import BlockServerSettings
        from corolla.chassis.lifecycle import run_service

    return run_service(BlockServerSettings, BlockServerProcess, **overrides)


if __name__ == "__main__":
    raise SystemExit(run())
