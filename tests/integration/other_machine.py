"""Another machine: a network namespace of this one, with one link to it. Root alone may make one."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherMachine:
    """A place where a test runs commands.

    Attributes:
        first_host: the address by which it reaches this machine.
        host: its own address.
        prefix: what stands before a command that shall run there; empty: it is this machine itself.
    """

    first_host: str = "127.0.0.1"
    host: str = "127.0.0.1"
    prefix: Sequence[str] = ()

    def drops(self, port: int, *, is_on: bool) -> bool:
        """Has a firewall there drop what comes in for a port, or no longer. Returns whether it can."""
        rule = ["INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP"]
        return bool(self.prefix) and all(
            _runs(*self.prefix, program, "-A" if is_on else "-D", *rule) for program in ("iptables", "ip6tables")
        )


@contextmanager
def other_machine(version: int = 4) -> Iterator[OtherMachine]:
    """Yields a namespace that is deleted afterwards; this machine itself where namespaces cannot be made.

    Args:
        version: of the internet protocol, by whose addresses the machines know each other.
    """
    number = os.getpid() % 16_000
    name, near, far = f"corolla-{number}", f"cn{number}", f"cf{number}"
    first_host, host = (
        f"10.{61 + number // 250}.{number % 250}.{each}" if version == 4 else f"fd61::{number:x}:{each}"
        for each in (1, 2)
    )
    size = ["/30"] if version == 4 else ["/64", "nodad"]
    made = [
        ("netns", "add", name),
        ("link", "add", near, "type", "veth", "peer", "name", far, "netns", name),
        ("addr", "add", f"{first_host}{size[0]}", "dev", near, *size[1:]),
        ("link", "set", near, "up"),
        ("-n", name, "addr", "add", f"{host}{size[0]}", "dev", far, *size[1:]),
        ("-n", name, "link", "set", far, "up"),
        ("-n", name, "link", "set", "lo", "up"),
    ]
    try:
        if all(_succeeds(*each) for each in made):
            yield OtherMachine(first_host, host, ("ip", "netns", "exec", name))
        else:
            yield OtherMachine()
    finally:
        _succeeds("link", "del", near)
        _succeeds("netns", "del", name)


def _succeeds(*arguments: str) -> bool:
    return _runs("ip", *arguments)


def _runs(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
