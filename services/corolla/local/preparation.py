"""Finds the model before anything needs it, so that one process fetches it and not every one at once.

Runs as a child of its own, since fetching starts threads, which its parent never does; what it finds it writes to its
output as a JSON line.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from corolla.chassis.errors import StartupError


def main(arguments: Sequence[str]) -> int:
    """`arguments` is the model's name or folder. What it writes is the outcome: `prepared` or `failed`."""
    (model,) = arguments
    from corolla.models.checkpoint import Checkpoint

    try:
        checkpoint = Checkpoint.from_pretrained(model)
        # The servers hold all blocks between them.
        checkpoint.fetch()
        head_blocks = checkpoint.head_blocks()
    except StartupError as failure:
        _tell("failed", message=failure.message)
        return 1
    _tell(
        "prepared",
        num_blocks=checkpoint.num_blocks,
        head_blocks=head_blocks,
        model_type=checkpoint.config.model_type,
        name=checkpoint.name,
    )
    return 0


def _tell(event: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()
