"""Says what a report of pip-audit means, which it reads; the argument names the lock that was audited.

Exit status 1: a package has a known vulnerability. Where the advisories were out of reach, the snapshot counts that
`make advisories` has stored, for packages of the versions that it names. A package that neither knows passes, and the
verdict says so loudly: a machine without advisories must be able to verify everything else.
"""

import json
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

SNAPSHOT = "advisories.json"
OLD_DAYS = 30

_PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)


def main(lock: str) -> int:
    text = sys.stdin.read()
    try:
        packages: list[dict[str, Any]] = json.loads(text)["dependencies"]
    except (ValueError, KeyError):
        packages = []
    if not any("vulns" in each for each in packages):
        packages = _from_snapshot(Path(lock))
    audited = [each for each in packages if "vulns" in each]
    for each in audited:
        for found in each["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "none yet"
            sys.stdout.write(f"    {each['name']} {each['version']}: {found['id']}; fixed in: {fixed}\n")
    if not audited:
        sys.stdout.write(f"    !!! {lock} WAS NOT AUDITED: this machine cannot reach the advisories !!!\n")
    else:
        sys.stdout.write(f"    {lock}: {len(audited)} of {len(packages)} packages audited\n")
        for each in packages:
            if "vulns" not in each:
                sys.stdout.write(f"    !!! {each['name']} WAS NOT AUDITED: {each['skip_reason']} !!!\n")
    return int(any(each["vulns"] for each in audited))


def _from_snapshot(lock: Path) -> list[dict[str, Any]]:
    """What the snapshot beside a lock says of its packages; nothing where there is none."""
    try:
        snapshot = json.loads((lock.parent / SNAPSHOT).read_text())
        pins = _PIN.findall(lock.read_text())
    except FileNotFoundError:
        return []
    known = {(each["name"], each["version"]): each for each in snapshot["dependencies"] if "vulns" in each}
    age_days = (date.today() - date.fromisoformat(snapshot["taken"])).days
    sys.stdout.write(f"    by the advisories of {snapshot['taken']}, {age_days} days ago\n")
    if age_days > OLD_DAYS:
        sys.stdout.write("    !!! THESE ADVISORIES ARE OLD: run `make advisories` where they can be reached !!!\n")
    return [known.get(pin, {"name": pin[0], "skip_reason": "not in the snapshot in this version"}) for pin in pins]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
