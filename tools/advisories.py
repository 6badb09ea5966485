"""Makes one snapshot of reports of pip-audit, which it reads, one JSON object a line: what is known today.

Exit status 1, and no snapshot: there is a lock for which nothing was reported.
"""

import json
import sys
from datetime import date


def main(num_locks: int) -> int:
    reports = [json.loads(line)["dependencies"] for line in sys.stdin if line.strip()]
    audited = {(each["name"], each["version"]): each for report in reports for each in report if "vulns" in each}
    if len(reports) != num_locks or not audited:
        sys.stderr.write("this machine cannot reach the advisories; nothing was stored\n")
        return 1
    snapshot = {"taken": date.today().isoformat(), "dependencies": [audited[key] for key in sorted(audited)]}
    sys.stdout.write(json.dumps(snapshot, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
