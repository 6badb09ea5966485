"""`python -m corolla` is the `corolla` command."""

import sys

from corolla.cli.interruption import imports_end_at_once


def main() -> int:
    """Runs the command of this process's arguments. Returns its exit status."""
    with imports_end_at_once():
        from corolla.cli.app import main as run

        return run()


if __name__ == "__main__":
    sys.exit(main())
