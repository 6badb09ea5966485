"""Says which lock holds the torch that pip would install: reads pip's report, writes `cpu` or `cuda`."""

import json
import sys


def main() -> None:
    (torch,) = json.load(sys.stdin)["install"]
    file_name = torch["download_info"]["url"].rpartition("/")[2]
    is_cpu = "+cpu-" in file_name.replace("%2B", "+").replace("%2b", "+") or "macosx" in file_name
    sys.stdout.write("cpu\n" if is_cpu else "cuda\n")


if __name__ == "__main__":
    main()
