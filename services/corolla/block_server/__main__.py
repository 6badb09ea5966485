"""`python -m corolla.block_server`: a block server, configured by `COROLLA_*` variables."""

import os
from typing import Any


def run(**overrides: Any) -> int:
    """Runs a block server until a signal; `overrides` win over the environment. Returns the exit status."""
    # Must be set before torch is imported: spinning OpenMP threads starve the neighbours on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from corolla.block_server.process import BlockServerProcess
    from corolla.block_server.settings import BlockServerSettings
    from corolla.chassis.lifecycle import run_service

    return run_service(BlockServerSettings, BlockServerProcess, **overrides)


if __name__ == "__main__":
    raise SystemExit(run())
