"""A language model of whole numbers: every answer is exact, however steps are cut, batched, cached or replayed.

A hidden state is one number below a prime that float32 represents; a block adds to it what it reads in the keys of all
tokens that it sees. So each token depends on every token before it, on its position and on every block; a lost, doubled
or moved token, or a page of another session, changes all that follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from corolla.cache.store import KVStore
from corolla.client.text.tokenizer import TextTokenizer
from corolla.compute.base import Embed, LaunchedBatch, RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.decoding.parameters import SamplingParams
from corolla.decoding.sampling import Sampler
from corolla.models.edges import Edges
from corolla.wire.device_copies import Reading
from corolla.wire.span import Span
from tests.sampled import sample

PRIME: Final = 8_388_593


@dataclass(frozen=True, slots=True)
class ToyModel:
    """The unsplit model.

    Attributes:
        windows: for each block, how many tokens a token sees, itself included; None for all.
        vocab_size: few tokens, so that texts repeat themselves and draft tokens are sometimes right.
        eos_token_id: ends an answer.
    """

    windows: tuple[int | None, ...]
    vocab_size: int = 12
    eos_token_id: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.windows)

    def embed(self, token_id: int, position: int) -> int:
        return (token_id * 7_919 + position * 104_729 + 17) % PRIME

    def key(self, block: int, position: int, state: int) -> int:
        """The cache entry of a token in a block."""
        return (state * (2 * block + 3) + position * 1_299_709 + block) % PRIME

    def start(self, block: int, position: int) -> int:
        """The first token that a token sees."""
        window = self.windows[block]
        return 0 if window is None else max(0, position - window + 1)

    def block(self, block: int, position: int, state: int, keys: "np.ndarray[Any, Any]") -> int:
        """A token's state after a block; `keys` are those of the tokens that it sees."""
        start = position + 1 - len(keys)
        weights = np.arange(2 * start + 1, 2 * position + 2, 2, dtype=np.int64)
        return (state * (block + 2) + int(keys @ weights)) % PRIME

    def logits(self, states: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """float32 `[R, V]`."""
        tokens = np.arange(1, self.vocab_size + 1, dtype=np.int64)
        scrambled = (states[:, None] * (2 * tokens + 1) + tokens * 15_485_863) % PRIME
        return (scrambled * (8.0 / PRIME)).astype(np.float32)

    def answer(
        self, prompt_ids: Sequence[int], max_tokens: int, params: SamplingParams, *, ignores_eos: bool
    ) -> list[int]:
        """The answer of one machine that does nothing but this."""
        sampler = Sampler(params, prompt_ids)
        size = len(prompt_ids) + max_tokens
        keys = np.zeros((self.num_blocks, size), dtype=np.int64)
        answer: list[int] = []
        text = list(prompt_ids)
        position = 0
        while len(answer) < max_tokens and (ignores_eos or not answer or answer[-1] != self.eos_token_id):
            state = 0
            for token_id in text[position:]:
                state = self.embed(token_id, position)
                for block in range(self.num_blocks):
                    keys[block, position] = self.key(block, position, state)
                    state = self.block(block, position, state, keys[block, self.start(block, position) : position + 1])
                position += 1
            token = sample(sampler, torch.from_numpy(self.logits(np.array([state])))[0]).token_id
            answer.append(token)
            text.append(token)
        return answer


def unexpected_failure() -> None:
    """An engine calls it when its runner can compute nothing, which a toy always can."""
    raise AssertionError("the toy model cannot compute")


class LateReading(Reading):
    """Numbers that have not arrived when somebody first looks."""

    def __init__(self) -> None:
        super().__init__()
        self._num_looks = 0

    @property
    def has_arrived(self) -> bool:
        self._num_looks += 1
        return self._num_looks > 2


class ToyRunner(SpanRunner):
    """A runner whose blocks are the toy's; pages, positions and order of work are the real one's.

    Attributes:
        num_bad_batches: so many next batches come out as NaN.
    """

    def __init__(self, model: ToyModel, span: Span, *, num_pages: int, page_tokens: int, max_step_tokens: int) -> None:
        self.model = cast(Any, _ToySpan(span))
        self.store = KVStore(
            num_pages, page_tokens, model.windows[span.start : span.end], max_step_tokens=max_step_tokens
        )
        self.decode_graphs = None
        self.num_bad_batches = 0
        self._toy = model

    def _computed(self, rows: Sequence[RowWork], hidden: Tensor | Embed, blocks: Span) -> Tensor:
        if not isinstance(hidden, Tensor):
            hidden = hidden(torch.tensor([row.position for row in rows]))
        states = hidden[:, 0].numpy().astype(np.int64)
        start = 0
        for row in rows:
            end = start + row.num_tokens
            for block in range(blocks.start, blocks.end):
                states[start:end] = self._forward_block(row, block, states[start:end])
            start = end
        output = torch.from_numpy(states.astype(np.float32)).unsqueeze(1)
        if self.num_bad_batches:
            self.num_bad_batches -= 1
            output.fill_(torch.nan)
        return output

    def launch(self, rows: Sequence[RowWork], hidden: Tensor | Embed, blocks: Span) -> LaunchedBatch:
        return replace(super().launch(rows, hidden, blocks), reading=LateReading())

    def may_be_recorded(self, rows: Sequence[RowWork], blocks: Span) -> bool:
        return all(row.num_tokens == 1 for row in rows)

    def _forward_block(self, row: RowWork, block: int, states: "np.ndarray[Any, Any]") -> list[int]:
        layer = block - self.span.start
        like = torch.empty(1, 1, 1, dtype=torch.int64)
        keys = self.store.layer_like(layer, like, like)[0].numpy()[:, 0, 0]
        group = self.store.group_of(layer)
        for offset, slot in enumerate(row.cache.slots(row.position, row.num_tokens, group)):
            keys[slot] = self._toy.key(block, row.position + offset, int(states[offset]))
        outputs: list[int] = []
        for position, state in enumerate(states, row.position):
            extents = row.cache.extents(position + 1, self._toy.start(block, position), group)
            seen = np.concatenate([keys[first : first + count] for first, count in extents])
            outputs.append(self._toy.block(block, position, int(state), seen))
        return outputs


class _ToySpan:
    """The interface of a model for a runner."""

    hidden_size = 1
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, span: Span) -> None:
        self.span = self.all_blocks = span


class ToyEdges(Edges):
    """The toy's embedding and head."""

    has_embedding = has_head = True
    hidden_size = 1

    def __init__(self, model: ToyModel) -> None:
        self._toy = model

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        states = [
            self._toy.embed(token_id, position)
            for token_id, position in zip(token_ids.tolist(), position_ids.tolist(), strict=True)
        ]
        return torch.tensor(states, dtype=torch.float32).unsqueeze(1)

    def head(self, hidden: Tensor) -> Tensor:
        states = hidden[:, 0]
        logits = torch.from_numpy(self._toy.logits(states.nan_to_num().numpy().astype(np.int64)))
        return logits.masked_fill(states.isnan().unsqueeze(1), torch.nan)


class ToyTokenizer(TextTokenizer):
    """Each token is a letter."""

    def __init__(self) -> None:
        self.special_token_ids = frozenset()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)
