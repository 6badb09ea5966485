"""All benchmarks of a chain, one after another.

python -m benchmarks                             # make bench: about 40 minutes
python -m benchmarks streams prefill --markdown
"""

import argparse
from types import ModuleType

from benchmarks import (
    client_token,
    crowd,
    distance,
    expansion,
    hop_parts,
    hops,
    host_cache,
    loading,
    microbatches,
    packed,
    prefill,
    prefix,
    quality,
    single_stream,
    streams,
    tracing,
)
from benchmarks.command import show

_ALL: tuple[ModuleType, ...] = (
    single_stream,
    streams,
    prefill,
    prefix,
    host_cache,
    hops,
    hop_parts,
    client_token,
    crowd,
    tracing,
    distance,
    microbatches,
    loading,
    expansion,
    quality,
    packed,
)


def main() -> None:
    by_name = {module.__name__.rpartition(".")[2]: module for module in _ALL}
    parser = argparse.ArgumentParser(description="All benchmarks of a chain, one after another.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join(by_name)}")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables, dated, with the machine")
    options = parser.parse_args()
    unknown = set(options.names) - set(by_name)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
    for name in options.names or by_name:
        module = by_name[name]
        usual = argparse.ArgumentParser()
        module.add_options(usual)
        print(f"\n## {name}\n" if options.markdown else f"\n{name}: {(module.__doc__ or '').splitlines()[0]}\n")
        show(list(module.measure(usual.parse_args([]))), as_json_text=False, markdown=options.markdown)


if __name__ == "__main__":
    main()
