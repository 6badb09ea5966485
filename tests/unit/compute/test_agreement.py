"""A small copy of a model, and its layers with their own weights, agree with transformers, or the start fails."""

from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.chassis.errors import CorollaError, StartupError
from corolla.compute import agreement
from corolla.compute.agreement import LayerCheck, check_small_copy
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.families import FAMILIES
from corolla.models.fused import FusedLayer
from corolla.models.small_copy import small_config
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint, tiny_config
from tests.families import family_cases
from tests.tiers import quick
from tests.unit.models.test_visible_tokens import PLANTED

PAGE_TOKENS = 4


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what agreed; nothing has."""
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agreements"


def described(family: str, **changes: Any) -> Checkpoint:
    """A checkpoint without weights."""
    config = tiny_config(family, bos_token_id=0, eos_token_id=1, pad_token_id=None, **changes)
    return Checkpoint(family, Path(), config, FAMILIES[family], {})


@pytest.mark.parametrize("family", family_cases(kept=("gemma2",)))
def test_every_family_agrees_or_is_refused(family: str, forgotten: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_agreed = 0
    for planted in ("nothing", "a window in use", "kinds with a window", "another window"):
        try:
            checkpoint = described(family, **PLANTED[planted])
        except Exception:
            continue  # no checkpoint has such a configuration
        failure = ""
        try:
            check_small_copy(checkpoint, PAGE_TOKENS)
            num_agreed += 1
        except CorollaError as refusal:
            failure = refusal.message
        assert "would be wrong" not in failure, planted
        assert planted != "nothing" or not failure
    assert num_agreed
    assert len(list(forgotten.iterdir())) <= num_agreed
    assert "no small copy" not in caplog.text


def test_a_small_copy_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check_small_copy(described("llama"), PAGE_TOKENS)
    monkeypatch.setattr(agreement, "small_config", lambda *_: pytest.fail("it was checked again"))
    check_small_copy(described("llama"), PAGE_TOKENS)
    with pytest.raises(pytest.fail.Exception):
        check_small_copy(described("llama", rms_norm_eps=1e-3), PAGE_TOKENS)


@pytest.mark.parametrize(
    "mistake", quick([{"window": None}, {"window": 3}, {"scaling": 0.5}, {"softcap": None}], {"window": None})
)
def test_a_mistake_in_the_blocks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: dict[str, Any], forgotten: Path
) -> None:
    folder = make_tiny_checkpoint("gemma2", tmp_path / "gemma2", config_changes={"sliding_window": 5})
    checkpoint = Checkpoint.from_pretrained(str(folder))
    build = FusedLayer.__init__

    def mistaken(layer: FusedLayer, *arguments: Any, **options: Any) -> None:
        build(layer, *arguments, **options)
        if layer.window is not None:
            for name, value in mistake.items():
                setattr(layer, name, value)

    model = load_span(checkpoint, Span(1, 5), dtype=torch.float32)
    check = LayerCheck(model, PAGE_TOKENS * 2)
    monkeypatch.setattr(FusedLayer, "__init__", mistaken)
    with pytest.raises(StartupError, match="differ from those of transformers"):
        check_small_copy(checkpoint, PAGE_TOKENS)
    assert not forgotten.exists()
    if "window" not in mistake or mistake["window"] == 3:
        with pytest.raises(StartupError, match="block 3 of gemma2 is not served"):
            check.compare(SpanRunner(model, num_pages=8, page_tokens=PAGE_TOKENS * 2), "gemma2")


@pytest.mark.parametrize("options", [{}, {"is_fused": False}, {"kv_cache_dtype": "int8"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_their_own_weights_agree(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("gemma2", tmp_path / "gemma2")))
    model = load_span(checkpoint, Span(1, 5), dtype=dtype)
    check = LayerCheck(model, PAGE_TOKENS)
    runner = SpanRunner(model, num_pages=8, page_tokens=PAGE_TOKENS, **options)
    check.compare(runner, checkpoint.name)
    assert runner.store.pool.num_free == 8


def test_a_copy_of_a_large_model_is_small() -> None:
    large = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}
    checkpoint = described("mistral", num_blocks=32, sliding_window=4096, max_position_embeddings=32768, **large)
    small = small_config(checkpoint, 64)
    assert (small.num_hidden_layers, small.hidden_size, small.num_attention_heads) == (2, 512, 4)
    assert (small.num_key_value_heads, small.intermediate_size, small.sliding_window) == (2, 256, 64)


@pytest.mark.parametrize(
    "family, given, left",
    [
        ("kimi_linear", {"linear_num_heads": 32}, {"linear_num_heads": 4}),
        (
            "qwen3_next",
            {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
            {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        ),
        (
            "qwen3_next",
            {"linear_num_key_heads": 2, "linear_num_value_heads": 16},
            {"linear_num_key_heads": 1, "linear_num_value_heads": 8},
        ),
    ],
)
def test_a_copy_has_few_heads_of_linear_attention(family: str, given: dict[str, int], left: dict[str, int]) -> None:
    small = small_config(described(family, **given), 64)
    assert {name: getattr(small, name) for name in left} == left
