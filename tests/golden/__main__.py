"""`python -m tests.golden`: asks the unsplit demo model, with a progress bar, and writes its answers down."""

import json
import os
import platform
from dataclasses import asdict
from typing import Any

# Must be set before torch is imported: OpenMP reads it once.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from rich.console import Console
from rich.progress import track

from corolla.models.demo import demo_checkpoint
from tests.golden import ANSWERS, MAX_PROMPT_TOKENS, NUM_NEW_TOKENS, SAFE_GAP, GoldenAnswer, cases, prompt_texts
from tests.reference import Sampling, Unsplit, smallest_gap


def make_answer(unsplit: Unsplit, prompt: str, sampling: Sampling) -> GoldenAnswer:
    """Asks the unsplit model."""
    prompt_ids = unsplit.encode(prompt_texts()[prompt])[:MAX_PROMPT_TOKENS]
    reference = unsplit.generate(prompt_ids, NUM_NEW_TOKENS, sampling, ignore_eos=True)
    return GoldenAnswer(prompt, sampling, prompt_ids, reference.token_ids, smallest_gap(reference, sampling))


def main() -> None:
    """Writes all answers."""
    torch.set_num_threads(1)
    console = Console()
    unsplit = Unsplit.demo()
    answers = [
        make_answer(unsplit, prompt, sampling)
        for prompt, sampling in track(cases(), "Asking the unsplit model", console=console)
    ]
    for answer in answers:
        if answer.smallest_gap < SAFE_GAP:
            console.print(f"{answer.name}: a choice as close as {answer.smallest_gap:.1e}; take another seed or text")
    head = {
        "model": demo_checkpoint().stem,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": platform.machine(),
        "smallest_gap": min(answer.smallest_gap for answer in answers),
    }
    ANSWERS.write_text(_spelled(head, answers), encoding="utf-8")
    console.print(f"{ANSWERS}: {len(answers)} answers, closest choice {head['smallest_gap']:.1e}")


def _spelled(head: dict[str, Any], answers: list[GoldenAnswer]) -> str:
    """JSON with one line for each answer, so that a difference shows which one changed."""
    facts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines = ",\n".join(json.dumps(asdict(answer)) for answer in answers)
    return "{\n" + ",\n".join(facts) + ',\n"answers": [\n' + lines + "\n]\n}\n"


if __name__ == "__main__":
    main()
