"""Another machine: a network namespace of this one, with one link to it. Root alone may make one."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OtherMachine:
    """A place where a test runs commands.

    Attributes:
        first_host: the address by which it reaches this machine: of IPv6, if it is another one.
        host: its own address.
        first_host_4: an address of IPv4 by which it reaches this machine, too.
        prefix: what stands before a command that shall run there; empty: it is this machine itself.
    """

    first_host: str = "127.0.0.1"
    host: str = "127.0.0.1"
    first_host_4: str = "127.0.0.1"
    prefix: Sequence[str] = ()

    def drops(self, port: int, *, is_on: bool) -> bool:
        """Has a firewall there drop what comes in for a port, or no longer. Returns whether it can."""
        rule = ["INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP"]
        return bool(self.prefix) and all(
            _runs(*self.prefix, program, "-A" if is_on else "-D", *rule) for program in ("iptables", "ip6tables")
        )

    def without(self, folder: Path) -> Sequence[str]:
        """What stands before a command that shall run there and see nothing in a folder of this machine."""
        if not self.prefix:
            return ()
        script = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
        return (*self.prefix, "unshare", "--mount", "sh", "-c", script, str(folder))


@contextmanager
def other_machine() -> Iterator[OtherMachine]:
    """Yields a namespace that is deleted afterwards; this machine itself where namespaces cannot be made."""
    number = os.getpid() % 16_000
    name, near, far = f"corolla-{number}", f"cn{number}", f"cf{number}"
    first_host, host = (f"fd61::{number:x}:{each}" for each in (1, 2))
    first_host_4, host_4 = (f"10.{61 + number // 250}.{number % 250}.{each}" for each in (1, 2))
    made = [
        ("netns", "add", name),
        ("link", "add", near, "type", "veth", "peer", "name", far, "netns", name),
        ("addr", "add", f"{first_host}/64", "dev", near, "nodad"),
        ("addr", "add", f"{first_host_4}/30", "dev", near),
        ("link", "set", near, "up"),
        ("-n", name, "addr", "add", f"{host}/64", "dev", far, "nodad"),
        ("-n", name, "addr", "add", f"{host_4}/30", "dev", far),
        ("-n", name, "link", "set", far, "up"),
        ("-n", name, "link", "set", "lo", "up"),
    ]
    try:
        if all(_succeeds(*each) for each in made):
            yield OtherMachine(first_host, host, first_host_4, ("ip", "netns", "exec", name))
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
