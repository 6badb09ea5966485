"""What docs/several-machines.md says to run: the systemd unit, and the line for a container."""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.architecture.sources import ROOT

PAGE: Final = ROOT / "docs" / "several-machines.md"
FIRST: Final = "192.168.1.10:50054"
"""What the page calls the first machine."""


def unit() -> str:
    """The systemd unit of the page."""
    (found,) = re.findall(r"```\n(\[Unit\]\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


@dataclass(frozen=True, slots=True)
class Container:
    """What `docker run` of the page starts.

    Attributes:
        options: the values of each option that stands before the image.
        arguments: what the image's entry point gets.
    """

    options: Mapping[str, Sequence[str]]
    image: str
    arguments: Sequence[str]

    @property
    def variables(self) -> dict[str, str]:
        return dict(each.split("=", 1) for each in self.options["--env"])

    @property
    def mounts(self) -> dict[str, str]:
        """What is mounted, by the path in the container."""
        return {inside: outside for outside, inside, *_ in (each.split(":") for each in self.options["--volume"])}


def container() -> Container:
    """The container of the page. Each of its options has a value."""
    (found,) = re.findall(r"```sh\n(docker run .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    _, _, *words = shlex.split(found.replace("\\\n", " "))
    options = defaultdict(list)
    while words[0].startswith("--"):
        name, value, *words = words
        options[name].append(value)
    return Container(options, words[0], words[1:])


def entry_point() -> list[str]:
    """What the image of block servers runs."""
    (found,) = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile.server").read_text(encoding="utf-8"), re.MULTILINE)
    words: list[str] = json.loads(found)
    return words
