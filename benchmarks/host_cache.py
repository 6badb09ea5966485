"""A conversation that returns after the texts of others evicted its pages: its time to the first token.

python -m benchmarks.host_cache --rounds 3
"""

import argparse
from collections.abc import Iterator

from benchmarks.chain import Chain
from benchmarks.command import progress, random_ids, run
from benchmarks.figures import Figure, at_most, figure, ratio
from corolla.models.checkpoint import Checkpoint

_OWN_TOKENS = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--tokens", type=int, default=6000, help="of each text")
    parser.add_argument("--kv-cache-mib", type=int, default=192, help="of each server: room for fewer than two texts")
    parser.add_argument("--host-cache-mib", type=int, default=1024, help="of each server; 0 computes texts again")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    vocab_size, num_tokens = checkpoint.vocab_size, options.tokens
    environment = {
        "COROLLA_KV_CACHE_MIB": str(options.kv_cache_mib),
        "COROLLA_HOST_CACHE_MIB": str(options.host_cache_mib),
    }
    new_s, returning_s = list[float](), list[float]()
    with Chain(options.model, options.servers, environment=environment) as chain:
        chain.answer(random_ids(64, vocab_size, seed=0), 1)
        for number in range(1, options.rounds + 1):
            progress(f"round {number} of {options.rounds}")
            text, *others = (random_ids(num_tokens, vocab_size, seed=100 * number + each) for each in range(3))
            new_s += [chain.answer(each, 1).first_token_s for each in (text, *others)]
            own = random_ids(_OWN_TOKENS, vocab_size, seed=100 * number + 99)
            returning_s.append(chain.answer([*text, *own], 1).first_token_s)
    progress("")
    computed_s = [sum(new_s[start : start + 3]) / 3 for start in range(0, len(new_s), 3)]
    yield figure(f"first token of a new text of {num_tokens}", "s", computed_s)
    yield figure(f"first token of a text of {num_tokens} that was evicted", "s", returning_s)
    yield ratio(f"first token, evicted text of {num_tokens} / new", returning_s, computed_s, at_most(0.2))


if __name__ == "__main__":
    run(__doc__, add_options, measure)
