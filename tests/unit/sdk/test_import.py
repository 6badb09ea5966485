"""`from corolla import Client` stays quick: nothing heavy comes with it."""

import subprocess
import sys


def test_the_client_comes_without_heavy_packages() -> None:
    program = (
        "import sys; from corolla import AsyncClient, Client, errors; "
        "heavy = ('numpy', 'pydantic', 'redis', 'rich', 'torch', 'transformers'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
