"""Drafts the next tokens with a small model that runs in this process."""

import copy
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from corolla.chassis.errors import CheckpointError, UnsupportedFamily
from corolla.models.checkpoint import Checkpoint
from corolla.models.cut_model import build
from corolla.models.empty_model import model_class_of
from corolla.models.families import recurrent_layers
from corolla.models.loading import LOADING
from corolla.models.tokenizer import load_tokenizer

DRAFT_MODEL_RATES: Final[tuple[float, ...]] = (0.7,)
"""The share of draft tokens that are expected to be right before any was checked, for a single kind of evidence."""

_CHUNK_TOKENS: Final = 64
_MOST_DRAFT_TOKENS: Final = 128
"""No draft is longer, so only the last 128 tokens that the model has read may differ from the text."""


def num_weights(checkpoint: Checkpoint) -> int:
    """The number of weights of a whole model, from its configuration; no weights are read."""
    library: Any = AutoModelForCausalLM
    with LOADING, torch.device("meta"):
        model = library.from_config(checkpoint.config)
    return sum(parameter.numel() for parameter in model.parameters())


class DraftRoom:
    """Counts the tokens in the draft model's caches of all texts. A text that finds no room gets no drafts.

    Attributes:
        max_tokens: the most tokens of all caches together; readings that run at the same time may add a chunk each.
    """

    def __init__(self, max_tokens: float = math.inf) -> None:
        self.max_tokens = max_tokens
        self._num_tokens = 0
        self._lock = threading.Lock()

    @property
    def num_free(self) -> float:
        """How many further tokens there is room for."""
        return max(0, self.max_tokens - self._num_tokens)

    def add(self, num_tokens: int) -> None:
        """Notes that caches hold so many tokens more, or fewer if the number is negative."""
        with self._lock:
            self._num_tokens += num_tokens


@dataclass(frozen=True)
class DraftModel:
    """A small model that gives logits `[vocab_size]` for texts of at most `context_length` tokens.

    Attributes:
        vocab_size: the vocabulary of the target, the model for which it drafts.
        room: how many tokens its caches may hold.
    """

    causal_model: PreTrainedModel
    context_length: int
    vocab_size: int
    room: DraftRoom = field(default_factory=DraftRoom)

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: Checkpoint, *, dtype: torch.dtype, device: str) -> "DraftModel":
        """Reads the whole model.

        Raises:
            CheckpointError: its weights cannot be read, or its tokenizer has another vocabulary than the target's.
            UnsupportedFamily: one of the two has a recurrent state.
            HubUnavailable: the files are on the hub, and the hub cannot be reached.
        """
        if _vocabulary(checkpoint) != _vocabulary(target):
            raise CheckpointError(
                f"The draft model {checkpoint.name} has another tokenizer than the model that it is to draft for; "
                "COROLLA_DRAFT_MODEL must name a model of the same vocabulary."
            )
        if recurrent_layers(checkpoint.config):
            raise UnsupportedFamily(
                f"The draft model {checkpoint.name} has a recurrent state, and cannot take draft tokens back; "
                "COROLLA_DRAFT_MODEL must name a model whose blocks all have attention."
            )
        if recurrent_layers(target.config):
            raise UnsupportedFamily(
                f"{target.name} has a recurrent state, from which draft tokens cannot be taken back; "
                "leave COROLLA_DRAFT_MODEL empty."
            )
        config = copy.deepcopy(checkpoint.config)
        model_class = model_class_of(AutoModelForCausalLM, config)
        with checkpoint.open_tensors(checkpoint.names, dtype) as tensors:
            model: Any = build(checkpoint, model_class, config, tensors, dtype=dtype)
        return cls(model.to(torch.device(device)), checkpoint.context_length, target.vocab_size)

    def token_bytes(self) -> int:
        """The bytes of one token in a cache."""
        cache = DynamicCache()
        self.logits([0], cache)
        layers = cast(Sequence[Any], cache.layers)
        return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in layers)

    @torch.inference_mode()
    def logits(self, token_ids: list[int], cache: DynamicCache) -> Tensor:
        """The logits, float32 `[vocab_size]` on the CPU, after `token_ids`, which follow the tokens in `cache`."""
        # The target's embedding may have more rows. This model reads its last token in place of a token that it lacks:
        # later draft tokens may be worse, but the answer stays the same.
        embedding: Any = self.causal_model.get_input_embeddings()
        ids = torch.tensor([token_ids], device=self.causal_model.device).clamp(max=embedding.weight.shape[0] - 1)
        output = self.causal_model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = cast(Tensor, output.logits)[0, -1].float().cpu()[: self.vocab_size]
        # Penalties and biases have a number for each token of the target.
        missing = self.vocab_size - logits.shape[0]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class DraftReading:
    """The draft model's cache for one text, `token_ids`, and draft tokens after it. Its methods block the thread."""

    def __init__(self, model: DraftModel) -> None:
        self.token_ids: list[int] = []
        self._model = model
        # All layers get a plain cache, which can drop its newest tokens even where the model has a sliding window.
        self._cache = DynamicCache()
        self._cached_ids: list[int] = []
        weakref.finalize(self, _give_back, model.room, self._cached_ids)

    @property
    def num_tokens_left(self) -> int:
        """How many draft tokens there is room for: in the model's context, and in its caches after the text itself."""
        in_caches = self._model.room.num_free - (len(self.token_ids) - len(self._cached_ids))
        return int(max(0, min(self._model.context_length - len(self.token_ids), in_caches)))

    @property
    def is_behind(self) -> bool:
        """The model has yet to read some of the text before its last token, and has room for it."""
        return len(self._cached_ids) < len(self.token_ids) - 1 and self.num_tokens_left > 0

    def read_chunk(self) -> bool:
        """Reads the next chunk of the text before its last token; returns False when nothing is left to read."""
        start = len(self._cached_ids)
        chunk = self.token_ids[start : min(len(self.token_ids) - 1, start + _CHUNK_TOKENS)]
        if chunk and self.num_tokens_left:
            self._read(chunk)
        return bool(chunk) and self.num_tokens_left > 0

    def logits_after(self, newest: int) -> Tensor:
        """The logits, float32 `[vocab_size]` on the CPU, after the text's last token or a draft token after it."""
        return self._read([newest])

    def forget_rejected_tokens(self) -> None:
        """Drops cached tokens from the first that differs from the text; the text's last token is read again."""
        num_right = min(len(self._cached_ids), len(self.token_ids) - 1)
        for index in range(max(0, num_right - _MOST_DRAFT_TOKENS), num_right):
            if self._cached_ids[index] != self.token_ids[index]:
                num_right = index
                break
        if (num_wrong := len(self._cached_ids) - num_right) > 0:
            self._cache.crop(-num_wrong)
            del self._cached_ids[num_right:]
            self._model.room.add(-num_wrong)

    def _read(self, token_ids: list[int]) -> Tensor:
        logits = self._model.logits(token_ids, self._cache)
        self._cached_ids.extend(token_ids)
        self._model.room.add(len(token_ids))
        return logits


def _give_back(room: DraftRoom, cached_ids: list[int]) -> None:
    room.add(-len(cached_ids))


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    try:
        tokenizer = load_tokenizer(checkpoint.folder)
    # A parser may raise anything for a broken file; the Rust tokenizers raise a plain Exception.
    except Exception as error:
        raise CheckpointError(f"The tokenizer of {checkpoint.name} cannot be read.") from error
    return dict(tokenizer.get_vocab())
