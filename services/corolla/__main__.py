"""`python -m corolla` is the `corolla` command."""

import sys

from corolla.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
