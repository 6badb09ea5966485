"""Says what a report of pip-audit means, which it reads; the argument names the lock that was audited.

Exit status 1: a package has a known vulnerability. Where the advisories were out of reach it says so, loudly, and is no
failure: a machine without them must be able to verify everything else.
"""

import json
import sys
from typing import Any


def main() -> int:
    lock, text = sys.argv[1], sys.stdin.read()
    try:
        packages: list[dict[str, Any]] = json.loads(text)["dependencies"]
    except (ValueError, KeyError):
        packages = []
    audited = [each for each in packages if "vulns" in each]
    for each in audited:
        for found in each["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "none yet"
            sys.stdout.write(f"    {each['name']} {each['version']}: {found['id']}; fixed in: {fixed}\n")
    if not audited:
        sys.stdout.write(f"    !!! {lock} WAS NOT AUDITED: the advisories cannot be reached from here !!!\n")
    else:
        sys.stdout.write(f"    {lock}: {len(audited)} of {len(packages)} packages audited\n")
        for each in packages:
            if "vulns" not in each:
                sys.stdout.write(f"    !!! {each['name']} WAS NOT AUDITED: {each['skip_reason']} !!!\n")
    return int(any(each["vulns"] for each in audited))


if __name__ == "__main__":
    sys.exit(main())
