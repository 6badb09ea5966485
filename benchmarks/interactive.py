"""A conversation of ten turns: in one session, against processing the whole text at every turn.

    python -m benchmarks.interactive --servers 2 --rounds 3

Both sides run through the same chain of processes and give the same tokens. For each turn: the tokens that the block
servers processed, and the time to the first new token, as the median of the rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from corolla.hf import AutoDistributedModelForCausalLM, DistributedModelForCausalLM, InferenceSession
from corolla.local.options import StackOptions
from corolla.local.stack import Stack
from corolla.models.checkpoint import Checkpoint

NUM_TURNS = 10
ANSWER_TOKENS = 24
QUESTIONS = (
    "What is the capital of France?",
    "Which river flows through it?",
    "Name three other cities of that country.",
    "Which of them lies by the sea?",
    "What do people eat there?",
    "How is the weather in winter?",
    "When should one travel there?",
    "How does one get there by train?",
    "What should one see on the first day?",
    "And what on the second day?",
)


@dataclass(frozen=True)
class Turn:
    """One turn of one side.

    Attributes:
        processed_tokens: that went through the blocks.
        first_token_s: time to the first new token.
    """

    processed_tokens: int
    first_token_s: float


class FirstToken(BaseStreamer):
    """When the first new token came."""

    def __init__(self) -> None:
        self._num_pieces = 0
        self.time_s = 0.0

    def put(self, value: Any) -> None:
        self._num_pieces += 1
        if self._num_pieces == 2:  # the prompt comes first
            self.time_s = time.perf_counter()

    def end(self) -> None:
        pass


class HopTokens:
    """What the first block server has computed so far, as its metrics say."""

    def __init__(self, stack: Stack) -> None:
        self._url = f"http://127.0.0.1:{stack.servers[0].metrics_port}/metrics"

    def __call__(self) -> int:
        with urllib.request.urlopen(self._url) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            samples = [sample for family in families for sample in family.samples]
        return round(sum(sample.value for sample in samples if sample.name == "corolla_hop_tokens_total"))


class Conversation:
    """The turns, one after another; a session keeps what was processed, without one everything is processed again."""

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        tokenizer: Any,
        hop_tokens: HopTokens,
        session: InferenceSession | None = None,
    ) -> None:
        self._model = model
        self._hop_tokens = hop_tokens
        self._tokenizer = tokenizer
        self._session = session
        self.text = torch.empty(1, 0, dtype=torch.int64)

    def turn(self, question: str) -> Turn:
        message: Tensor = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        ).input_ids
        self.text = torch.cat([self.text, message], dim=1)
        first, processed = FirstToken(), self._hop_tokens()
        started = time.perf_counter()
        self.text = self._model.generate(
            self.text,
            session=self._session,
            streamer=first,
            do_sample=False,
            min_new_tokens=ANSWER_TOKENS,
            max_new_tokens=ANSWER_TOKENS,
        )
        return Turn(self._hop_tokens() - processed, first.time_s - started)


def converse(
    model: DistributedModelForCausalLM, tokenizer: Any, hop_tokens: HopTokens
) -> tuple[list[Turn], list[Turn]]:
    """One round: both sides take each turn in alternation. Returns the turns with the session, then those without."""
    session = model.inference_session(max_length=2048)
    kept = Conversation(model, tokenizer, hop_tokens, session)
    again = Conversation(model, tokenizer, hop_tokens)
    turns: tuple[list[Turn], list[Turn]] = ([], [])
    for question in QUESTIONS[:NUM_TURNS]:
        for conversation, taken in zip((kept, again), turns, strict=True):
            taken.append(conversation.turn(question))
        assert torch.equal(kept.text, again.text)
    session.close()
    return turns


def median_turns(rounds: list[list[Turn]]) -> list[Turn]:
    return [
        Turn(turns[0].processed_tokens, statistics.median(turn.first_token_s for turn in turns))
        for turns in zip(*rounds, strict=True)
    ]


def report(kept: list[Turn], again: list[Turn]) -> None:
    """A table of the turns, and the two ratios that count."""
    print(f"{'turn':>4} {'tokens, session':>16} {'tokens, anew':>13} {'first, session':>15} {'first, anew':>12}")
    for number, (one, other) in enumerate(zip(kept, again, strict=True), 1):
        print(
            f"{number:4} {one.processed_tokens:16} {other.processed_tokens:13} "
            f"{one.first_token_s * 1000:12.0f} ms {other.first_token_s * 1000:9.0f} ms"
        )
    cheaper = again[-1].processed_tokens / kept[-1].processed_tokens
    print(f"turn {NUM_TURNS} processes {cheaper:.1f} times fewer tokens than anew")
    slower = kept[-1].first_token_s / kept[1].first_token_s
    print(f"the first token of turn {NUM_TURNS} takes {slower:.2f} times as long as that of turn 2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo", help="one with a chat template: folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="block servers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()

    torch.set_num_threads(1)
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    with tempfile.TemporaryDirectory() as log_folder:
        wanted = StackOptions(model=options.model, num_servers=options.servers, log_folder=Path(log_folder))
        with Stack(wanted) as stack:
            model = AutoDistributedModelForCausalLM.from_pretrained(options.model, router=stack.router_address)
            tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.folder)
            rounds = [converse(model, tokenizer, HopTokens(stack)) for _ in range(options.rounds + 1)][1:]
    kept, again = (median_turns([each[side] for each in rounds]) for side in (0, 1))
    if options.json:
        print(json.dumps({"session": [asdict(turn) for turn in kept], "anew": [asdict(turn) for turn in again]}))
    else:
        report(kept, again)


if __name__ == "__main__":
    main()
