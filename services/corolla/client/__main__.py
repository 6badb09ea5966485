"""`python -m corolla.client`: a client service, configured by `COROLLA_*` variables."""

import os
from typing import Any


def run(**overrides: Any) -> int:
    """Runs a client service until a signal; `overrides` win over the environment. Returns the exit status."""
    # Must be set before torch is imported: spinning OpenMP threads starve the neighbours on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from corolla.chassis.lifecycle import run_service
    from corolla.client.service import ClientService
    from corolla.client.settings import ClientSettings

    return run_service(ClientSettings, ClientService, **overrides)


if __name__ == "__main__":
    raise SystemExit(run())
