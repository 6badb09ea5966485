"""Weights from other machines: how fast an idle server gives them, and what callers of a server that gives them notice.

    python -m benchmarks.peer_weights --rounds 5

A file of random numbers is fetched from one idle peer, from two, and by a bare copy, over mutual TLS on the loopback
device; all of them hash what they get, and write it. Then two hops with the demo model serve streams, while another
process fetches a third of the model's file and gives it up, again and again: from both, or from two processes that only
send. The latter is what the answers are compared with, since on one machine a transfer takes processor time from all.
"""

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.chain import Chain
from benchmarks.command import interleaved, progress, random_ids, run
from benchmarks.figures import Figure, at_least, at_most, figure, percentile
from corolla.models.checkpoint import Checkpoint
from corolla.models.manifest_maker import make_manifest
from corolla.models.model_manifest import PART_BYTES, ManifestFile, ModelManifest
from corolla.trust.authority import Authority
from corolla.trust.workload import Role, Workload

_MIB: Final = 1 << 20
_LINK: Final = 5e9 / 8 / _MIB
"""5 Gbit/s."""
_SHARE: Final = 0.8
_MOST_LATER: Final = 1.2
_PROMPT_TOKENS: Final = 16
_THIRD_MIB: Final = 48


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="of transfers from idle peers; 0: none")
    parser.add_argument("--mib", type=int, default=2048, help="size of the file")
    parser.add_argument("--folder", type=Path, help="where files lie; by default in the folder of temporary files")
    parser.add_argument("--loaded-rounds", type=int, default=5, help="of answers with and without a transfer; 0: none")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.rounds:
            yield from _idle(Path(folder), options.mib, options.rounds)
        if options.loaded_rounds:
            yield from _loaded(Path(folder), options)


def _idle(folder: Path, num_mib: int, num_rounds: int) -> Iterator[Figure]:
    file = folder / "whole" / "weights.gguf"
    file.parent.mkdir()
    with file.open("wb") as made:
        for _ in range(num_mib):
            made.write(os.urandom(_MIB))
    manifest = _manifest_of(file, folder)
    Authority().issue(folder / "tls", Workload("bench", Role.BLOCK, "peer"), ("127.0.0.1",), None)
    served = [str(manifest), str(file.parent), str(folder / "tls")]
    with contextlib.ExitStack() as running:
        ports = [_process(running, "serve", *served).stdout.readline().strip() for _ in range(2)]
        addresses = [f"127.0.0.1:{port}" for port in ports]

        def fetched(num_peers: int) -> float:
            arguments = [
                str(manifest),
                str(folder / "there"),
                str(folder / "tls"),
                str(num_mib),
                "",
                *addresses[:num_peers],
            ]
            return _speed("fetch", *arguments)

        def copied() -> float:
            with contextlib.ExitStack() as copying:
                port = _process(copying, "send", str(file), str(folder / "tls")).stdout.readline().strip()
                return _speed("receive", str(folder / "copy"), str(folder / "tls"), f"127.0.0.1:{port}")

        sides: dict[str, Callable[[], float]] = {
            "bare copy": copied,
            "one peer": partial(fetched, 1),
            "two peers": partial(fetched, 2),
        }
        speeds = interleaved(sides, num_rounds)
    for name, found in speeds.items():
        yield figure(f"{num_mib} MiB, {name}", "MiB/s", found)
    for name in ("one peer", "two peers"):
        shares = [each / min(_LINK, copy) for each, copy in zip(speeds[name], speeds["bare copy"], strict=True)]
        yield figure(f"{name} / the lesser of 5 Gbit/s and a bare copy", "x", shares, at_least(_SHARE))


def _loaded(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained("demo")
    manifest = make_manifest(checkpoint, folder / "manifests")
    if manifest is None:
        raise RuntimeError("the demo model has no manifest")
    prompts = [random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(options.streams)]
    speeds: dict[str, list[float]] = {"from them": [], "from others": []}
    chain = Chain("demo", 2, is_secure=True, environment={"COROLLA_MANIFEST": str(manifest)})
    with chain, contextlib.ExitStack() as serving:
        tls = chain.certificates(Role.BLOCK, "joining")
        placed = chain.placed
        here = (str(manifest), str(folder / "joining"), str(tls), str(_THIRD_MIB), placed[0].fingerprint)
        served = (str(manifest), str(checkpoint.files_folder), str(tls), "computing")
        others = [_process(serving, "serve", *served).stdout.readline().strip() for _ in placed]

        def undisturbed() -> float:
            heard = chain.answers(prompts, options.tokens)
            return 1e3 * percentile([gap for each in heard for gap in each.gaps_s], 99)

        def disturbed(name: str, addresses: Sequence[str]) -> float:
            with contextlib.ExitStack() as running:
                fetching = _process(running, "fetch", *here, *addresses)
                fetching.stdout.readline()  # what follows is imported by now
                found = undisturbed()
                # The last transfer goes on without streams.
                *lines, _ = [line.split() for line in fetching.communicate()[0].splitlines()]
            speeds[name].append(sum(int(each) for each, _ in lines) / sum(float(each) for _, each in lines) / _MIB)
            return found

        sides: dict[str, Callable[[], float]] = {
            "without": undisturbed,
            "from them": partial(disturbed, "from them", [each.address for each in placed]),
            "from others": partial(disturbed, "from others", [f"127.0.0.1:{port}" for port in others]),
        }
        gaps = interleaved(sides, options.loaded_rounds)
    name = f"{options.streams} streams, time between two tokens, p99"
    yield figure(f"{name}, without a transfer", "ms", gaps["without"])
    for side, found in speeds.items():
        yield figure(f"{name}, with a transfer {side}", "ms", gaps[side])
        yield figure(f"that transfer {side}", "MiB/s", found)
    later = [one / other for one, other in zip(gaps["from them"], gaps["from others"], strict=True)]
    yield figure(f"{name}, from them / from others", "x", later, at_most(_MOST_LATER))
    progress("")


def _manifest_of(file: Path, folder: Path) -> Path:
    with file.open("rb") as source:
        checksums = "".join(
            hashlib.sha256(source.read(PART_BYTES)).hexdigest() for _ in range(-(-file.stat().st_size // PART_BYTES))
        )
    manifest = ModelManifest(file.name, "0" * 64, [ManifestFile(file.name, file.stat().st_size, 0, checksums)])
    path = folder / f"{hashlib.sha256(manifest.written()).hexdigest()}.json"
    path.write_bytes(manifest.written())
    return path


def _process(running: contextlib.ExitStack, what: str, *arguments: str) -> Any:
    """A process that ends with `running`."""
    command = [sys.executable, "-m", "benchmarks.peer_weights_process", what, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    running.callback(process.wait)
    running.callback(process.kill)
    return process


def _speed(what: str, *arguments: str) -> float:
    """MiB/s of one transfer."""
    with contextlib.ExitStack() as running:
        num_bytes, seconds = _process(running, what, *arguments).communicate()[0].split()
    return float(int(num_bytes) / float(seconds) / _MIB)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
