"""Installs packages of a lock with uv, from where pip's settings say: `python tools/locked_install.py -r LOCK`.

uv unpacks many packages at a time and needs a seventh of the processor time that pip takes for the same. The machine's
owner names indexes, folders of wheels and certificates in pip's settings, which uv does not read. Variables of uv
itself come first.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LOCK: Final = Path(__file__).resolve().parents[1] / "requirements" / "lock.txt"
PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")
UV: Final = Path(sys.executable).with_name("uv")

# Each option of pip, the variable of uv that says the same, and the separator of several values.
VARIABLES: Final = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
}
# Where several sections of pip's settings have an option, the last one of these counts.
_SECTIONS: Final = ("global", "install", ":env:")


def uv_variables(listing: str) -> dict[str, str]:
    """The environment with which uv looks where pip does.

    Args:
        listing: what `pip config list` printed.
    """
    # pip weighs the files of all places alike; each file has to have the lock's hash.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for section in _SECTIONS:
        for option, value in re.findall(rf"^{section}\.([a-z-]+)=(.*)$", listing, flags=re.MULTILINE):
            if option in VARIABLES:
                name, separator = VARIABLES[option]
                variables[name] = separator.join(ast.literal_eval(value).split())
    return variables


def locked(name: str, lock: str) -> str:
    """The entry of one package in the text of a lock: its version, and its hashes."""
    found = re.search(rf"^{re.escape(name)}==(?:.*\\\n)*.*\n", lock, flags=re.MULTILINE)
    if found is None:
        raise SystemExit(f"{name} is not in the lock")
    return found[0]


def install_uv() -> None:
    """Has pip install uv itself, from its entry in the lock."""
    subprocess.run(
        [*PIP, "install", "-qq", "--no-compile", "--require-hashes", "--no-deps", "-r", "/dev/stdin"],
        input=locked("uv", LOCK.read_text(encoding="utf-8")).encode(),
        check=True,
    )


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    if not UV.exists():
        install_uv()
    listing = subprocess.run([*PIP, "config", "list"], check=True, capture_output=True, text=True).stdout
    return subprocess.run(
        [UV, "pip", "install", "--python", sys.executable, "--no-deps", "--require-hashes", *arguments],
        env={**uv_variables(listing), **environment},
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
