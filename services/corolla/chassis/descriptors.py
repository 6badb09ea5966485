"""The limit of this process's file descriptors, and what its ports may take of it.

A process that has none left hears no new caller and cannot connect to the server that should take over for a lost one.
So each port accepts connections up to a quarter of the limit. No service has more than three ports, apart from the one
of the metrics with its few connections; a quarter remains for connections, files and pipes of the service's own.
"""

import resource
from pathlib import Path
from typing import Final

_PORTS_AND_RESERVE: Final = 4
_SYSTEM_LIMIT: Final = Path("/proc/sys/fs/nr_open")


def raise_limit() -> None:
    """Raises the soft limit to the hard one, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = int(_SYSTEM_LIMIT.read_text(encoding="ascii"))
    if soft != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def most_connections_of_a_port() -> int:
    """Returns how many connections one port of this process may have open at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = int(_SYSTEM_LIMIT.read_text(encoding="ascii"))
    return max(1, soft // _PORTS_AND_RESERVE)
