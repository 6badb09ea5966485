"""The digest of what a server computes with: equal for equal choices, another one for each other choice."""

import importlib.metadata
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.compute import compiled_blocks, threads
from corolla.compute.attention import backends
from corolla.compute.numerics import kind_of, machine_facts, numerics_of
from corolla.compute.span_runner import SpanRunner
from corolla.kernels.products import plain_layout
from corolla.models import linear, product_rule
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path_factory.mktemp("numerics") / "tiny")))


def runner(checkpoint: Checkpoint, span: str = "0:2", dtype: torch.dtype = torch.float32, **options: Any) -> SpanRunner:
    options = {"attention": "sdpa", "products": "library", **options}
    return SpanRunner(load_span(checkpoint, Span.parse(span), dtype=dtype), num_pages=4, **options)


def test_every_choice_counts_and_the_span_does_not(checkpoint: Checkpoint) -> None:
    usual = numerics_of(runner(checkpoint), None)
    assert numerics_of(runner(checkpoint, "2:5"), None) == usual
    others: list[dict[str, Any]] = [
        {"dtype": torch.bfloat16}, {"attention": "compiled"}, {"is_fused": False}, {"page_tokens": 16},
        {"kv_cache_dtype": "int8"},
    ]  # fmt: skip
    found = {numerics_of(runner(checkpoint, **options), None).blocks for options in others}
    assert len(found | {usual.blocks}) == len(others) + 1


def test_the_kind_of_a_server_follows_from_device_dtype_and_settings() -> None:
    usual = kind_of(torch.device("cpu"), torch.float32, {"products": "auto"})
    assert kind_of(torch.device("cpu"), torch.float32, {"products": "auto"}) == usual
    assert kind_of(torch.device("cpu"), torch.bfloat16, {"products": "auto"}) != usual
    assert kind_of(torch.device("cpu"), torch.float32, {"products": "library"}) != usual


def test_ways_to_multiply_count(checkpoint: Checkpoint) -> None:
    plain = runner(checkpoint)
    usual = numerics_of(plain, None)
    relaid = plain.model.linears[0]
    relaid.use(relaid.weight)
    assert numerics_of(plain, None) != usual


def test_only_a_server_with_the_head_names_how_it_computes_the_head(checkpoint: Checkpoint) -> None:
    last = runner(checkpoint, "2:5")
    with_head = load_edges(checkpoint, dtype=torch.float32, has_embedding=False)
    without = load_edges(checkpoint, dtype=torch.float32, has_head=False)
    assert not numerics_of(last, without).head
    with_head.choose_products("library")
    named = numerics_of(last, with_head)
    assert named.head
    assert named.blocks == numerics_of(last, without).blocks


def test_choices_do_not_follow_a_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours of a server keep the processors busy, so what it could measure is random."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path, config_changes=sizes)))
    found = set()
    for seed in range(3):
        draw = random.Random(seed).uniform
        for name in ("monotonic", "perf_counter", "process_time", "thread_time", "time"):
            monkeypatch.setattr(time, name, lambda draw=draw: draw(0.0, 1e6))
            monkeypatch.setattr(time, f"{name}_ns", lambda draw=draw: int(draw(0.0, 1e15)))
        edges = load_edges(checkpoint, dtype=torch.float32, has_embedding=False)
        edges.choose_products()
        chosen = runner(checkpoint, attention="auto", products="auto")
        found.add((str(chosen.kernel_choices), str(edges.product_ways), numerics_of(chosen, edges)))
    assert len(found) == 1
    assert not any(hasattr(module, "time") for module in (backends, compiled_blocks, linear, product_rule, threads))
    if plain_layout(torch.float32) is not None:
        assert chosen.kernel_choices.blocks == "compiled"


def test_instructions_that_round_in_another_way_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for capabilities in ({}, {"avx512_bf16": True}, {"avx512_bf16": True, "amx_bf16": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        found.append(machine_facts(torch.device("cpu"), torch.bfloat16))
    assert found[0] != found[1] != found[2] != found[0]


@pytest.mark.parametrize("package, device", [("triton", "cuda"), ("llvmlite", "cpu")])
def test_the_version_of_the_compiler_counts(monkeypatch: pytest.MonkeyPatch, package: str, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    version = importlib.metadata.version

    def facts(released: str) -> dict[str, str]:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: released if name == package else version(name))
        return machine_facts(torch.device(device), torch.float32)

    assert facts("3.6.0") != facts("3.7.0")
