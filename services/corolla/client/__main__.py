"""`python -m corolla.client`: a client service, configured by `COROLLA_*` variables."""

from typing import Any

from corolla.chassis.heap import uncollected_imports


def run(**overrides: Any) -> int:
    """Runs a client service until a signal; `overrides` win over the environment. Returns the exit status."""
    with uncollected_imports():
        from corolla.chassis.lifecycle import run_service
        from corolla.client.service import ClientService
        from corolla.client.settings import ClientSettings

    return run_service(ClientSettings, ClientService, **overrides)


if __name__ == "__main__":
    raise SystemExit(run())
