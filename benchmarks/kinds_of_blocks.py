"""A decode step of blocks by the family's own code beside the way that a server takes, for kinds of blocks.

    python -m benchmarks.kinds_of_blocks --rows 1 8
    python -m benchmarks.kinds_of_blocks --kinds deepseek_v2_lite --long 8000

Four small random blocks of each kind, one thread, 128 tokens before the first step; times are processor time of that
thread. Both sides take each step in turn, and the ratio is formed within the step. Kinds that no whole blocks run are
fused modules; a kind whose ratio is 1 needs none. With `--long`, a server's way with so many tokens stands next to the
same way with 128. What the sessions hold is random then.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.command import run
from benchmarks.figures import Figure, figure
from corolla.cache.store import SessionCache
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint

_SPAN: Final = Span(0, 4)
_HELD_TOKENS: Final = 128
_WARM_UP_STEPS: Final = 10
_HIDDEN_SIZE: Final = 512
_SHAPE: Final = {
    "hidden_size": _HIDDEN_SIZE, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class _Kind:
    family: str
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    changes: dict[str, Any] = field(default_factory=dict)


KINDS: Final = {
    "llama": _Kind("llama"),
    "gemma3": _Kind("gemma3_text"),
    "qwen3_moe": _Kind("qwen3_moe", changes={"moe_intermediate_size": 256}),
    "glm4_moe": _Kind("glm4_moe", changes={"moe_intermediate_size": 256}),
    "ernie4_5_moe": _Kind("ernie4_5_moe", changes={"moe_intermediate_size": 256}),
    "gpt_oss": _Kind("gpt_oss", changes={"intermediate_size": 256}),
    "glm4": _Kind("glm4"),
    "float16": _Kind("llama", torch.float16),
    "int8 caches": _Kind("llama", kv_cache_dtype="int8"),
    # Fewer experts, of which a token gets as many.
    "deepseek_v2_lite": _Kind(
        "deepseek_v2",
        changes={
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16,
            "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 6,
            "n_shared_experts": 2, "topk_method": "greedy", "first_k_dense_replace": 1,
            "max_position_embeddings": 1 << 15,
        },
    ),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="sessions of a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[name for name in KINDS if "lite" not in name])
    parser.add_argument("--long", type=int, help="tokens of a long text")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(1)
    for name in options.kinds:
        kind: _Kind = KINDS[name]
        with tempfile.TemporaryDirectory() as folder:
            path = make_tiny_checkpoint(
                kind.family, Path(folder) / "model", num_blocks=len(_SPAN), config_changes={**_SHAPE, **kind.changes}
            )
            ways = (True,) if options.long else (True, False)
            sides = [_runner(Checkpoint.from_pretrained(str(path)), kind, is_fused=each) for each in ways]
        if options.long:
            ratios = list(_long_ratios(sides[0], options.long, options.steps))[_WARM_UP_STEPS:]
            what = f"a step that holds {options.long} tokens / one that holds {_HELD_TOKENS}"
            yield figure(f"{name}, {sides[0].kernel_choices.blocks}: {what}", "x", ratios)
            continue
        for num_rows in options.rows:
            ratios = list(_ratios(sides, num_rows, options.steps))[_WARM_UP_STEPS:]
            yield figure(f"{name}, {num_rows} rows: family's own / {sides[0].kernel_choices.blocks}", "x", ratios)


def _runner(checkpoint: Checkpoint, kind: _Kind, *, is_fused: bool) -> SpanRunner:
    model = load_span(checkpoint, _SPAN, dtype=kind.dtype)
    return SpanRunner(model, is_fused=is_fused, kv_cache_dtype=kind.kv_cache_dtype)


def _long_ratios(runner: SpanRunner, num_tokens: int, num_steps: int) -> Iterator[float]:
    hidden = torch.randn(1, runner.model.hidden_size)
    lengths, caches = (_HELD_TOKENS, num_tokens), [runner.new_cache() for _ in range(2)]
    for length, cache in zip(lengths, caches, strict=True):
        cache.reserve(length + num_steps)
        runner.forward([RowWork(cache, 0, 1)], hidden, _SPAN)
        cache.prepare(1, length - 1)
        cache.commit(length)
    with torch.inference_mode():
        for layer in range(len(_SPAN)):
            for numbers in runner.store.layer(layer):
                numbers.normal_()
    for step in range(num_steps):
        seconds = [0.0, 0.0]
        for which in (0, 1) if step % 2 else (1, 0):
            row = RowWork(caches[which], lengths[which] + step, 1)
            began_s = time.thread_time()
            runner.forward([row], hidden, _SPAN)
            seconds[which] = time.thread_time() - began_s
        yield seconds[1] / seconds[0]


def _ratios(sides: Sequence[SpanRunner], num_rows: int, num_steps: int) -> Iterator[float]:
    caches: list[list[SessionCache]] = [[runner.new_cache() for _ in range(num_rows)] for runner in sides]
    prompt, hidden = torch.randn(num_rows * _HELD_TOKENS, _HIDDEN_SIZE), torch.randn(num_rows, _HIDDEN_SIZE)
    for runner, held in zip(sides, caches, strict=True):
        for cache in held:
            cache.reserve(_HELD_TOKENS + num_steps)
        runner.forward([RowWork(cache, 0, _HELD_TOKENS) for cache in held], prompt, _SPAN)
    for step in range(num_steps):
        seconds = [0.0, 0.0]
        for side in (0, 1) if step % 2 else (1, 0):
            rows = [RowWork(cache, _HELD_TOKENS + step, 1) for cache in caches[side]]
            began_s = time.thread_time()
            sides[side].forward(rows, hidden, _SPAN)
            seconds[side] = time.thread_time() - began_s
        yield seconds[1] / seconds[0]
    for held in caches:
        for cache in held:
            cache.clear()


if __name__ == "__main__":
    run(__doc__, add_options, measure)
