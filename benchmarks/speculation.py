"""Speculation against plain decoding, over links that are as slow as one says.

    python -m benchmarks.speculation --delays 0 2 10 --rounds 2
    python -m benchmarks.speculation --delays 0 10 --rounds 3 --mtp

Plain and drafted answers to one prompt are made one after the other, in changing order, and their ratio is formed
within the pair, so that a noisy machine is equally unkind to both. Every drafted answer must be the plain one, token
for token.
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.command import run
from benchmarks.distant_chain import DistantChain
from benchmarks.figures import Figure, figure
from benchmarks.local_model import unsplit_folder
from corolla.chassis.errors import HopUnavailable, NoChain
from corolla.models.checkpoint import Checkpoint
from corolla.sdk.results import Generation
from tests.mtp_models import make_trained_checkpoint, some_prompts

NUM_DRAFT_TOKENS = 10
_MTP_TOKENS = 2
_MAX_ATTEMPTS = 4

_CODE = """def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def spread(values):
    center = mean(values)
    return max(abs(value - center) for value in values)
"""
_GOODS = (
    "apples from Kent", "pears from Anjou", "plums from Zagreb", "figs from Izmir", "dates from Basra",
    "limes from Colima", "quinces from Tokat",
)  # fmt: skip
_LIST = "".join(f"- {each}\n" for each in _GOODS)
_QUOTE = (
    "The harbour lay quiet under a thin fog, and only the bell of the outer buoy could be heard. Three fishing boats "
    "had gone out before dawn; none of them had yet returned, and the women on the pier counted the minutes in silence."
)
REPETITIVE: dict[str, dict[str, Any]] = {
    "code": {"prompt": f"{_CODE}\n# The same code once more:\n\n{_CODE[:40]}"},
    "list": {"prompt": f"Shopping list:\n{_LIST}\nThe same shopping list, copied word by word:\n- apples from"},
    "quote": {"prompt": f'{_QUOTE}\n\nThe author wrote: "{_QUOTE[:24]}'},
}
HOSTILE: dict[str, dict[str, Any]] = {
    # Pairs of digits have all been seen before, and nothing follows from them.
    "digits": {
        "prompt": "Random digits: 3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 2 3 8 4 6 2 6 4 3 3 8 3 2 7",
        "temperature": 1.3,
    },
    "story": {"prompt": "Once upon a time, in a small village by the sea,", "temperature": 1.0},
    "essay": {"prompt": "Three reasons why rivers change their course:", "temperature": 1.0},
}


@dataclass(frozen=True)
class Pair:
    """A drafted answer beside the plain one."""

    ratio: float
    plain_tokens_per_s: float
    acceptance: float
    passes_per_token: float


def compare(
    chain: DistantChain, case: dict[str, Any], seed: int, num_tokens: int, mode: str, *, plain_first: bool
) -> Pair:
    options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, **case}
    if "temperature" in case:
        options["seed"] = seed
    prompt = options.pop("prompt")
    answers = {}
    for each in ("off", mode) if plain_first else (mode, "off"):
        answers[each] = _generate(chain, prompt, {**options, "speculation": each})
    plain, drafted = answers["off"], answers[mode]
    assert drafted.token_ids == plain.token_ids, "speculation must not change the answer"
    usage = drafted.usage
    # The first token comes from the prompt's own pass.
    num_passes = usage.completion_tokens - 1 - usage.accepted_tokens
    return Pair(
        ratio=usage.tokens_per_s / plain.usage.tokens_per_s,
        plain_tokens_per_s=plain.usage.tokens_per_s,
        acceptance=usage.accepted_tokens / usage.drafted_tokens if usage.drafted_tokens else math.nan,
        passes_per_token=num_passes / (usage.completion_tokens - 1),
    )


def _generate(chain: DistantChain, prompt: str, options: dict[str, Any]) -> Generation:
    """Again, where an overloaded machine let a link time out."""
    for attempt in range(_MAX_ATTEMPTS):
        try:
            return chain.generate(prompt, **options)
        except (HopUnavailable, NoChain) as failure:
            print(f"again: {failure.message}", file=sys.stderr, flush=True)
            time.sleep(5 * (attempt + 1))
    return chain.generate(prompt, **options)


def figures_of(pairs: Mapping[str, list[Pair]], what: str) -> Iterator[Figure]:
    """Yields the figure of one set of texts, and the ratio of each text."""
    every = [pair for each in pairs.values() for pair in each]
    yield figure(f"{what}, drafted / plain", "x", [pair.ratio for pair in every])
    yield figure(f"{what}, plain", "tokens/s", [pair.plain_tokens_per_s for pair in every])
    if accepted := [100 * pair.acceptance for pair in every if not math.isnan(pair.acceptance)]:
        yield figure(f"{what}, accepted", "%", accepted)
    yield figure(f"{what}, passes for a token", "", [pair.passes_per_token for pair in every])
    if len(pairs) > 1:
        for case, own in pairs.items():
            yield figure(f"{what}, {case}, drafted / plain", "x", [pair.ratio for pair in own])


def compare_all(chains: Mapping[str, DistantChain], options: argparse.Namespace) -> Iterator[Figure]:
    sets: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
        "repetitive, lookup": ("lookup", "prompt_lookup", REPETITIVE),
        "hostile, lookup": ("lookup", "prompt_lookup", HOSTILE),
    }
    if options.draft_models:
        sets["exact clone"] = ("clone", "draft_model", {"quote": REPETITIVE["quote"]})
        sets["perturbed clone"] = ("perturbed", "draft_model", {"quote": REPETITIVE["quote"]})
    if options.mtp:
        prompts = some_prompts(4, 12, seed=1).tolist()
        sets = {"mtp": ("mtp", "draft_model", {str(number): {"prompt": each} for number, each in enumerate(prompts)})}
    sets = {name: each for name, each in sets.items() if options.only in name}
    for chain in chains.values():
        chain.generate("Once", max_tokens=4)
    for delay_ms in options.delays:
        for chain in chains.values():
            chain.set_delay(delay_ms)
        for name, (drafter, mode, cases) in sets.items():
            # Whole drafts and the token after each, so that none is cut short at the end.
            num_tokens = options.tokens if mode == "prompt_lookup" else 1 + 4 * (NUM_DRAFT_TOKENS + 1)
            pairs: dict[str, list[Pair]] = {case: [] for case in cases}
            for number in range(options.rounds):
                for case, given in cases.items():
                    pair = compare(chains[drafter], given, number, num_tokens, mode, plain_first=number % 2 == 0)
                    pairs[case].append(pair)
            yield from figures_of(pairs, f"links of {delay_ms:g} ms, {name}")


@contextmanager
def perturbed(folder: Path, strength: float) -> Iterator[Path]:
    """A copy of a checkpoint whose logits are off: its head has random weights added, `strength` times as large."""
    with tempfile.TemporaryDirectory() as copied:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        head = model.get_output_embeddings().weight.detach().clone()
        noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0)) * head.std() * strength
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(head + noise)
        for path in folder.iterdir():
            if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                shutil.copy(path, copied)
        model.save_pretrained(copied)
        yield Path(copied)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--blocks", nargs="+", default=["0:15", "15:30"], help="one block server for each span")
    parser.add_argument("--delays", nargs="+", type=float, default=[0.0, 2.0, 10.0], help="milliseconds of each link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of one answer")
    parser.add_argument("--draft-models", action="store_true", help="clones of the model as draft models, too")
    parser.add_argument(
        "--mtp", action="store_true", help="a tiny model instead, whose multi-token prediction block was trained"
    )
    parser.add_argument(
        "--noise", type=float, default=0.1, help="of the perturbed clone, in units of its head's spread"
    )
    parser.add_argument("--only", default="", help="sets whose name has this in it")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the processes' logs; kept")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    fixed = {"COROLLA_ADAPTIVE_DRAFTS": "false", "COROLLA_MAX_DRAFT_TOKENS": str(NUM_DRAFT_TOKENS)}
    settings: dict[str, dict[str, str]] = {"lookup": {}}
    with ExitStack() as exits:
        if options.mtp:
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory())) / "tiny"
            options.model, options.blocks = str(make_trained_checkpoint(folder)[0]), ["0:2", "2:4"]
            settings = {"mtp": {**fixed, "COROLLA_DRAFT_MODEL": "mtp", "COROLLA_MAX_DRAFT_TOKENS": str(_MTP_TOKENS)}}
        checkpoint = Checkpoint.from_pretrained(options.model)
        checkpoint.fetch()
        if options.draft_models:
            noisy = exits.enter_context(perturbed(unsplit_folder(checkpoint), options.noise))
            settings |= {"clone": {**fixed, "COROLLA_DRAFT_MODEL": options.model},
                         "perturbed": {**fixed, "COROLLA_DRAFT_MODEL": str(noisy)}}  # fmt: skip
        chains = {}
        for name, own in settings.items():
            logs = options.logs / name if options.logs else None
            chains[name] = exits.enter_context(DistantChain(options.model, options.blocks, own, logs))
        yield from compare_all(chains, options)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
