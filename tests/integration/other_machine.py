"""Other machines: network namespaces of this one, with links to it and to each other. Root alone may make them."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class OtherMachine:
    """A place where a test runs commands.

    Attributes:
        name: the name of the namespace.
        first_host: the address of IPv6 by which it reaches this machine.
        host: its own address.
        first_host_4: an address of IPv4 by which it reaches this machine, too.
        link: the end of its link that is on this machine.
    """

    name: str
    first_host: str
    host: str
    first_host_4: str
    link: str

    @property
    def prefix(self) -> Sequence[str]:
        """What stands before a command that shall run there."""
        return "ip", "netns", "exec", self.name

    def drops(self, port: int, *, is_on: bool) -> bool:
        """Has a firewall there drop what comes in for a port, or no longer. Returns whether there is a firewall."""
        rule = ["-A" if is_on else "-D", "INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP"]
        return all(_runs(*self.prefix, program, *rule) for program in ("iptables", "ip6tables"))

    def without(self, folder: Path) -> Sequence[str]:
        """What stands before a command that shall run there and see nothing in a folder of this machine."""
        script = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
        return (*self.prefix, "unshare", "--mount", "sh", "-c", script, str(folder))

    def cut(self) -> None:
        """Cuts its link: what is sent is lost, and no connection ends."""
        assert _succeeds("link", "set", self.link, "down")

    def reconnect(self) -> None:
        assert _succeeds("link", "set", self.link, "up")

    def die(self) -> None:
        """Kills all that runs there, as a machine without power does."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True).stdout
        for pid in listed.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def other_machines(number: int) -> Iterator[list[OtherMachine]]:
    """Yields namespaces that reach each other and this machine. Skips the test where none can be made."""
    own = os.getpid() % 16_000
    bridge, prefix, prefix_4 = f"cb{own}", f"fd61::{own:x}", f"10.{61 + own // 250}.{own % 250}"
    found = [
        OtherMachine(f"corolla-{own}-{each}", f"{prefix}:1", f"{prefix}:{each + 2}", f"{prefix_4}.1", f"cn{own}-{each}")
        for each in range(number)
    ]
    made = [
        ("link", "add", bridge, "type", "bridge"),
        ("addr", "add", f"{prefix}:1/112", "dev", bridge, "nodad"),
        ("addr", "add", f"{prefix_4}.1/24", "dev", bridge),
        ("link", "set", bridge, "up"),
    ]
    for each, machine in enumerate(found):
        far = f"cf{own}-{each}"
        made += [
            ("netns", "add", machine.name),
            ("link", "add", machine.link, "type", "veth", "peer", "name", far, "netns", machine.name),
            ("link", "set", machine.link, "master", bridge),
            ("link", "set", machine.link, "up"),
            ("-n", machine.name, "addr", "add", f"{machine.host}/112", "dev", far, "nodad"),
            ("-n", machine.name, "addr", "add", f"{prefix_4}.{each + 2}/24", "dev", far),
            ("-n", machine.name, "link", "set", far, "up"),
            ("-n", machine.name, "link", "set", "lo", "up"),
        ]
    try:
        if not all(_succeeds(*each) for each in made):
            pytest.skip("other machines are network namespaces here, and only root can make those")
        yield found
    finally:
        for machine in found:
            _succeeds("netns", "del", machine.name)
        _succeeds("link", "del", bridge)


def _succeeds(*arguments: str) -> bool:
    return _runs("ip", *arguments)


def _runs(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
