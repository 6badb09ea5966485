"""Becomes the embedded Redis, so that it is a child like the services: stopped in order, and never an orphan."""

import os
from collections.abc import Sequence
from typing import NoReturn

from corolla.local.redis_server import find_redis_server


def main(arguments: Sequence[str]) -> NoReturn:
    """`arguments` are host, port and the folder to run in."""
    host, port, folder = arguments
    binary = str(find_redis_server())
    options = {"--bind": host, "--port": port, "--dir": folder, "--daemonize": "no", "--save": "", "--appendonly": "no"}
    os.execv(binary, [binary, *(word for option in options.items() for word in option)])
