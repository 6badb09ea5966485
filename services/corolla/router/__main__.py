"""`python -m corolla.router`: a router, configured by `COROLLA_*` variables."""

from corolla.router.service import run

if __name__ == "__main__":
    raise SystemExit(run())
