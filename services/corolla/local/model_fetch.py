"""Finds or fetches the model before other processes need it, so that not all of them fetch it at once.

It also counts the devices that the block servers may take.

This module runs in a child of its own, since fetching starts threads, which the fork server must not do. It writes the
result to standard output as a line of JSON.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from corolla.chassis.errors import StartupError


def main(arguments: Sequence[str]) -> int:
    """Finds the model, and writes the event `prepared` or `failed`.

    Args:
        arguments: the model's name or folder and, if devices are to be counted, their kind.
    """
    model, *kinds = arguments
    from corolla.models.checkpoint import Checkpoint

    try:
        checkpoint = Checkpoint.from_pretrained(model)
        # All blocks are fetched, since the servers together hold all of them.
        checkpoint.fetch()
        head_blocks = checkpoint.head_blocks()
        num_devices = sum(map(_num_devices, kinds))
    except StartupError as failure:
        _tell("failed", message=failure.message)
        return 1
    _tell(
        "prepared",
        num_blocks=checkpoint.num_blocks,
        block_weights=checkpoint.vocab_size * checkpoint.hidden_size / head_blocks,
        head_blocks=head_blocks,
        num_devices=num_devices,
        model_type=checkpoint.config.model_type,
        name=checkpoint.name,
    )
    return 0


def _num_devices(kind: str) -> int:
    from corolla.compute.device import num_devices

    return num_devices(kind)


def _tell(event: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()
