"""Becomes the embedded Redis, so that it is a child like the services: stopped in order, and never an orphan."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from corolla.local.redis_server import redis_command


def main(arguments: Sequence[str]) -> NoReturn:
    """`arguments` are host, port and the folder to run in."""
    host, port, folder = arguments
    command = redis_command(host, int(port), Path(folder))
    os.execv(command[0], command)
