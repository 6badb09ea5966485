"""Other machines: network namespaces of this one, with links to it and to each other. Root alone may make them."""

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
def other_machines(number: int) -> Iterator[list[OtherMachine]]:
    """Yields namespaces that reach each other and this machine; all of them are this one where none can be made."""
    own = os.getpid() % 16_000
    bridge, prefix, prefix_4 = f"cb{own}", f"fd61::{own:x}", f"10.{61 + own // 250}.{own % 250}"
    names = [f"corolla-{own}-{each}" for each in range(number)]
    made = [
        ("link", "add", bridge, "type", "bridge"),
        ("addr", "add", f"{prefix}:1/112", "dev", bridge, "nodad"),
        ("addr", "add", f"{prefix_4}.1/24", "dev", bridge),
        ("link", "set", bridge, "up"),
    ]
    for each, name in enumerate(names):
        near, far = f"cn{own}-{each}", f"cf{own}-{each}"
        made += [
            ("netns", "add", name),
            ("link", "add", near, "type", "veth", "peer", "name", far, "netns", name),
            ("link", "set", near, "master", bridge),
            ("link", "set", near, "up"),
            ("-n", name, "addr", "add", f"{prefix}:{each + 2}/112", "dev", far, "nodad"),
            ("-n", name, "addr", "add", f"{prefix_4}.{each + 2}/24", "dev", far),
            ("-n", name, "link", "set", far, "up"),
            ("-n", name, "link", "set", "lo", "up"),
        ]
    try:
        if all(_succeeds(*each) for each in made):
            yield [
                OtherMachine(f"{prefix}:1", f"{prefix}:{each + 2}", f"{prefix_4}.1", ("ip", "netns", "exec", name))
                for each, name in enumerate(names)
            ]
        else:
            yield [OtherMachine()] * number
    finally:
        for name in names:
            _succeeds("netns", "del", name)
        _succeeds("link", "del", bridge)


def _succeeds(*arguments: str) -> bool:
    return _runs("ip", *arguments)


def _runs(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
