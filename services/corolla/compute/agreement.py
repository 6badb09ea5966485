"""Compares what the span runner computes with the family's own code, before a server serves."""

import hashlib
import json
import logging
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from corolla.chassis.errors import StartupError
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.cache_folder import default_cache_folder
from corolla.models.checkpoint import PROTOCOL_VERSION, Checkpoint
from corolla.models.edges import load_edges
from corolla.models.families import short_reason
from corolla.models.product_rule import Way
from corolla.models.small_copy import SmallCopy, small_config
from corolla.models.span_model import SpanModel, load_span
from corolla.models.visible_tokens import attention_windows
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_PAGES_PER_WINDOW: Final = 2
_WINDOWS: Final = 3
_SINGLE_TOKENS: Final = 5
# The largest error of a token, relative to the largest of its numbers, in float32. Experts may be chosen otherwise
# where two scores are nearly equal, so half of the tokens must keep to it.
_TOLERANCE: Final = 1e-3
# Tokens of a text for layers with their own weights: reading the weights takes the time.
_LAYER_TOKENS: Final = 7
_LAYER_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# Keys and values that were rounded to 8 bits.
_ENCODED_TOLERANCE: Final = 0.1


def check_small_copy(checkpoint: Checkpoint, page_tokens: int, *, is_fused: bool = True) -> None:
    """Runs a small random model like the checkpoint's, split and unsplit, on a CPU, and compares the logits.

    A configuration that once agreed is remembered in the cache folder by a digest.

    Args:
        page_tokens: tokens of a page. Windows get two pages, and the text is three windows long; without windows it
            has two pages.
        is_fused: see `SpanRunner`.

    Raises:
        StartupError: the logits differ.
        UnsupportedFamily: see `attention_windows`.
    """
    path = _remembered(checkpoint, page_tokens, is_fused)
    if path.exists():
        return
    began_s = time.monotonic()
    config = small_config(checkpoint, _PAGES_PER_WINDOW * page_tokens)
    try:
        small = SmallCopy.from_checkpoint(checkpoint, config)
        ids, expected = _unsplit_logits(small, page_tokens)
    except Exception as error:
        # A family may need sizes that fit each other in a way that only its own code knows.
        log.warning("there is no small copy to check", extra={"model": checkpoint.name, "reason": short_reason(error)})
        return
    difference = _difference(small, ids, expected, page_tokens, is_fused)
    if not difference <= _TOLERANCE:
        raise StartupError(
            f"{checkpoint.name} is not served, since its answers would be wrong: for a small model with this "
            f"config.json, the logits differ from those of transformers by {difference:.1g} of the largest; report "
            "the file as a bug, or serve another checkpoint."
        )
    log.info("a small copy agrees", extra={"difference": difference, "seconds": round(time.monotonic() - began_s, 2)})
    _remember(path)


@torch.inference_mode()
def _unsplit_logits(small: SmallCopy, page_tokens: int) -> tuple[Tensor, Tensor]:
    """The token ids of a text, int64 `[tokens]`, and the logits of the family's own model, `[tokens, V]` in float32."""
    window = _PAGES_PER_WINDOW * page_tokens
    has_windows = any(attention_windows(cast(PreTrainedModel, small.unsplit.base_model), small.family))
    num_tokens = min(_WINDOWS * window if has_windows else window, small.context_length)
    ids = torch.randint(small.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    return ids, cast(Any, small.unsplit)(input_ids=ids[None], use_cache=False).logits[0]


@torch.inference_mode()
def _difference(small: SmallCopy, ids: Tensor, expected: Tensor, page_tokens: int, is_fused: bool) -> float:
    """The largest of three medians of tokens' errors: those of the text's first half, its second, and single tokens."""
    singles = max(1, len(ids) - _SINGLE_TOKENS)
    middle = -(-singles // 2)
    bounds = [
        (0, middle),
        *([(middle, singles)] if middle < singles else []),
        *((each, each + 1) for each in range(singles, len(ids))),
    ]
    logits = _logits(small, ids, bounds, page_tokens, is_fused)
    errors = (logits - expected).abs().amax(dim=-1) / expected.abs().amax(dim=-1)
    parts = (errors[:middle], errors[middle:singles], errors[singles:])
    return max(float(part.nan_to_num(torch.inf).median()) for part in parts if len(part))


def _logits(small: SmallCopy, ids: Tensor, bounds: list[tuple[int, int]], page_tokens: int, is_fused: bool) -> Tensor:
    """The logits of a chain of two spans, which get the text in these parts."""
    cut = -(-small.num_blocks // 2)
    spans = [Span(0, cut), *([Span(cut, small.num_blocks)] if cut < small.num_blocks else [])]
    num_pages = 2 * small.num_blocks * (-(-len(ids) // page_tokens) + 1)
    edges = load_edges(small, dtype=torch.float32)
    runners = [
        SpanRunner(
            load_span(small, span, dtype=torch.float32),
            num_pages=num_pages,
            page_tokens=page_tokens,
            is_fused=is_fused,
            products=Way.LIBRARY,
        )
        for span in spans
    ]
    caches = [runner.new_cache() for runner in runners]
    for cache in caches:
        cache.reserve(len(ids))
    is_long = small.short_factor_length is not None and len(ids) > small.short_factor_length
    logits = []
    for start, end in bounds:
        hidden = edges.embed(ids[start:end], torch.arange(start, end))
        for runner, cache in zip(runners, caches, strict=True):
            hidden = runner.forward([RowWork(cache, start, end - start, long_factors=is_long)], hidden, runner.span)
        logits.append(edges.head(hidden))
    return torch.cat(logits)


class LayerCheck:
    """Compares one layer of each kind of a span, with its own weights, before and after others run its blocks.

    Args:
        model: a span that no runner has yet, so that the family's own code runs it.
        page_tokens: tokens of a page; a text has at most so many tokens.
    """

    def __init__(self, model: SpanModel, page_tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(min(_LAYER_TOKENS, page_tokens), model.hidden_size, generator=generator)
        self._hidden = hidden.to(model.dtype)
        self._expected = {index: self._own_output(model, index) for index in model.first_of_kinds}

    def _own_output(self, model: SpanModel, index: int) -> Tensor:
        positions = torch.arange(len(self._hidden), device=model.device)
        block = Span(model.span.start + index, model.span.start + index + 1)
        return model.forward(self._hidden.to(model.device)[None], positions[None], blocks=block)[0].float()

    def compare(self, runner: SpanRunner, name: str) -> None:
        """Runs the same layers by the runner, in a chunk and a single token.

        Args:
            name: the checkpoint's name.

        Raises:
            StartupError: an output differs.
        """
        tolerance = _ENCODED_TOLERANCE if runner.store.codec is not None else _LAYER_TOLERANCES[runner.model.dtype]
        for index, expected in self._expected.items():
            block, cache = Span(runner.span.start + index, runner.span.start + index + 1), runner.new_cache()
            cache.reserve(len(expected))
            parts = torch.split(self._hidden, [len(expected) - 1, 1]) if len(expected) > 1 else (self._hidden,)
            outputs = []
            for part in parts:
                work = RowWork(cache, cache.num_tokens, len(part))
                outputs.append(runner.forward([work], part, block).float())
            cache.clear()
            errors = (torch.cat(outputs) - expected).norm(dim=-1) / expected.norm(dim=-1)
            difference = float(errors.nan_to_num(torch.inf).median())
            if not difference <= tolerance:
                raise StartupError(
                    f"block {block.start} of {name} is not served, since its output would be wrong: it differs from "
                    f"that of transformers by {difference:.1g} of its length; set COROLLA_FUSED_BLOCKS=false, and "
                    "report the model as a bug."
                )


def _remembered(checkpoint: Checkpoint, page_tokens: int, is_fused: bool) -> Path:
    facts = [
        checkpoint.config.to_json_string(), page_tokens, is_fused,
        PROTOCOL_VERSION, metadata.version("corolla"), torch.__version__, transformers.__version__,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return default_cache_folder() / "agreements" / digest[:32]


def _remember(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        log.warning("the check is not remembered", extra={"folder": str(path.parent), "reason": str(error)})
