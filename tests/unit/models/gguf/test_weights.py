"""A GGUF file is the model that it was made of."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from corolla.chassis.errors import CheckpointError
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.gguf.header import TYPES, GgufTensor, read_header
from corolla.models.gguf.tensors import expanded
from corolla.models.loading import LOADING
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.bailing import write_bailing
from tests.checkpoints import LONG_ROPE_LENGTH, YARN, make_tiny_checkpoint
from tests.gguf_files import (
    FAMILIES_OF_FILES,
    LLAMA3,
    convert_tiny,
    make_long_rope_gguf,
    make_tiny_gguf,
    rewrite_gguf,
)
from tests.tiers import quick


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))


def logits(checkpoint: Checkpoint, token_ids: list[int], spans: list[Span]) -> torch.Tensor:
    edges = load_edges(checkpoint, dtype=torch.float32)
    positions = torch.arange(len(token_ids))
    hidden = edges.embed(torch.tensor(token_ids), positions)[None]
    for span in spans:
        hidden = load_span(checkpoint, span, dtype=torch.float32).forward(hidden, positions[None])
    return edges.head(hidden[0])


def facts(config: Any) -> dict[str, Any]:
    """What a configuration says that may change an answer, without what the defaults of transformers say, too."""
    found = {name: value for name, value in config.to_dict().items() if name not in _NOTES and value is not None}
    return {**found, "rope_parameters": unusual(found.get("rope_parameters", {}))}


def unusual(rope: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a rotary embedding, or of one for each kind of blocks, that are not the default ones."""
    of_kinds = {kind: unusual(each) for kind, each in rope.items() if isinstance(each, dict)}
    return of_kinds or {name: value for name, value in rope.items() if value != _ROPE.get(name)}


# Where a configuration comes from and which class reads it; fields that the families do not read, or read for no file.
_NOTES = frozenset(
    {
        "architectures", "dtype", "gguf_file", "transformers_version", "_name_or_path", "max_window_layers",
        "partial_rotary_factor", "moe_intermediate_size",
    }
)  # fmt: skip
_ROPE = {"beta_fast": 32.0, "beta_slow": 1.0, "partial_rotary_factor": 1.0}
# One of each kind: rows of halves, joined experts, norms with one more, latents, transposed experts, a part of a head
# that is rotated, blocks of two kinds, and the orders and logarithms of recurrent states.
_KINDS = ("llama", "qwen3_moe", "gemma2", "deepseek_v3", "gpt_oss", "glm4_moe", "lfm2", "qwen3_5_text")
# The family in whose structure another family's files are read.
_READ_AS = {"glm4_moe_lite": "deepseek_v3"}


@pytest.mark.parametrize("family", quick(FAMILIES_OF_FILES, *_KINDS))
def test_a_chain_of_a_file_equals_the_model_that_it_was_made_of(tmp_path: Path, family: str) -> None:
    source, path = make_tiny_gguf(family, tmp_path)
    assert_equal_to_model(path, source)
    checkpoint = Checkpoint.from_pretrained(str(path))
    assert checkpoint.config.model_type == _READ_AS.get(family, family)
    if family not in _READ_AS:
        given, own = facts(AutoConfig.from_pretrained(source)), facts(checkpoint.config)
        if family == "granitemoehybrid":
            del given["max_position_embeddings"]  # without a rotary embedding, the converter stores another one
        assert {name: own.get(name) for name in given} == given


_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "family, changes",
    [
        ("deepseek_v2", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}),
        ("deepseek_v2", {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
        ("deepseek_v3", {"rope_parameters": {**_YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("gpt_oss", {"rope_parameters": {**_YARN, "factor": 32.0, "truncate": False}}),
        ("ministral3", {"rope_parameters": {**YARN, "factor": 16.0, "llama_4_scaling_beta": 0.2}}),
        ("qwen3", {"rope_parameters": _YARN}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
        ("exaone4", {"rope_parameters": LLAMA3}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
        ("smollm3", {"rope_parameters": LLAMA3}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
        ("glm4", {"attention_bias": False}),
        ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.75}),
        ("qwen3_next", {"num_key_value_heads": 1, "linear_num_value_heads": 6}),
        ("ernie4_5", {"use_bias": False}),
        ("cohere", {"use_qk_norm": False, "attention_bias": True}),
        ("minimax_m2", {"head_dim": 32, "partial_rotary_factor": 0.5}),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            },
        ),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": {**_YARN, "attention_factor": 1.2},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            },
        ),
        ("granitemoehybrid", {"num_local_experts": 0, "max_position_embeddings": 1 << 20}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}),
        ("hunyuan_v1_dense", {"hidden_size": 512, "head_dim": 128, "max_position_embeddings": 32768,
                              "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0,
                                                  "factor": 1.0}}),
    ],
)  # fmt: skip
def test_what_else_published_configurations_say(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    source, path = make_tiny_gguf(family, tmp_path, changes=changes)
    assert_equal_to_model(path, source)
    if family != "hunyuan_v1_dense":  # its file has the base that follows from `alpha`, and a longer context
        given, own = facts(AutoConfig.from_pretrained(source)), facts(Checkpoint.from_pretrained(str(path)).config)
        assert {name: own.get(name) for name in given} == given


@pytest.mark.full
def test_the_text_part_of_a_mistral_that_sees_is_a_mistral(tmp_path: Path) -> None:
    source = make_tiny_checkpoint("mistral", tmp_path / "source", config_changes={"sliding_window": None})
    published = {"architectures": ["Mistral3ForConditionalGeneration"]}
    path = convert_tiny(source, tmp_path / "tiny.gguf", published=published)
    assert gguf.GGUFReader(path).fields["general.architecture"].contents() == "mistral3"
    assert_equal_to_model(path, source)
    assert Checkpoint.from_pretrained(str(path)).config.model_type == "mistral"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_files_of_ling_have_queries_keys_and_values_in_one_tensor(tmp_path: Path, kind: str) -> None:
    source = make_tiny_checkpoint("glm4_moe", tmp_path / "source", num_blocks=4)
    write_bailing(source, tmp_path / "ling")
    path = convert_tiny(tmp_path / "ling", tmp_path / f"tiny.{kind}.gguf", kind)
    assert "blk.0.attn_qkv.weight" in {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    if kind == "F32":
        assert_equal_to_model(path, source)
        return
    checkpoint = Checkpoint.from_pretrained(str(path))
    packed = load_span(checkpoint, Span(1, 3), dtype=torch.float32, quantization="packed")
    plain = load_span(checkpoint, Span(1, 3), dtype=torch.float32)
    assert {type(each).__name__ for each in packed.packed_layers} == {"PackedLinear", "PackedExpertWeights"}
    hidden = torch.randn(1, 7, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(packed.forward(hidden), plain.forward(hidden), rtol=1e-4, atol=1e-4)


@pytest.mark.full
@torch.inference_mode()
def test_experts_of_gpt_oss_stay_packed_in_mxfp4(tmp_path: Path) -> None:
    _, path = make_tiny_gguf("gpt_oss", tmp_path, kind="MXFP4", num_blocks=2)
    checkpoint = Checkpoint.from_pretrained(str(path))
    packed = load_span(checkpoint, Span(0, 2), dtype=torch.float32, quantization="packed")
    plain = load_span(checkpoint, Span(0, 2), dtype=torch.float32)
    own, expanded_experts = (
        [each for each in model.modules() if type(each).__name__ in ("PackedExperts", "GptOssExperts")]
        for model in (packed, plain)
    )
    for one, other in zip(own, expanded_experts, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            weights: Any = getattr(one, name)
            matrices = torch.stack([weights.matrix(expert, torch.float32) for expert in range(weights.shape[0])])
            assert torch.equal(matrices.transpose(1, 2), getattr(other, name))
    hidden = torch.randn(1, 7, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(packed.forward(hidden), plain.forward(hidden), rtol=1e-4, atol=1e-4)
    content, name = bytearray(path.read_bytes()), "blk.0.ffn_down_exps.weight"
    content[read_header(path).tensors[name].offset] = 200  # the exponent of a block
    (tmp_path / "large.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"large\.gguf has 'blk\.0\.ffn_down_exps.*COROLLA_QUANTIZATION to none"):
        load_span(Checkpoint.from_pretrained(str(tmp_path / "large.gguf")), Span(0, 1), dtype=torch.float32,
                  quantization="packed")  # fmt: skip


@pytest.mark.full
def test_older_files_have_one_matrix_for_keys_and_values_of_latents(tmp_path: Path) -> None:
    """Converters before May 2025 left `attn_kv_b` whole."""
    source, path = make_tiny_gguf("deepseek_v2", tmp_path)
    stored = {name: part.numpy() for shard in source.glob("*.safetensors") for name, part in load_file(shard).items()}
    tensors: dict[str, Any] = {}
    for block in range(4):
        tensors[f"blk.{block}.attn_kv_b.weight"] = stored[f"model.layers.{block}.self_attn.kv_b_proj.weight"]
        tensors |= {f"blk.{block}.attn_k_b.weight": None, f"blk.{block}.attn_v_b.weight": None}
    said = {"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.key_length": 24,
            "attention.value_length": 12, "attention.head_count_kv": 4}  # fmt: skip
    older = {f"deepseek2.{key}": value for key, value in said.items()}
    assert_equal_to_model(rewrite_gguf(path, tmp_path / "older.gguf", older, tensors), source)


@pytest.mark.full
def test_experts_may_have_gates_and_inputs_in_one_tensor(tmp_path: Path) -> None:
    """llama.cpp's converter writes them so with `--fuse-gate-up-exps`."""
    source, path = make_tiny_gguf("qwen3_moe", tmp_path)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    tensors: dict[str, Any] = {}
    for block in range(4):
        names = [f"blk.{block}.ffn_{name}_exps.weight" for name in ("gate", "up", "gate_up")]
        tensors |= {names[0]: None, names[1]: None, names[2]: np.concatenate([stored[name] for name in names[:2]], 1)}
    assert_equal_to_model(rewrite_gguf(path, tmp_path / "fused.gguf", tensors=tensors), source)


@pytest.mark.parametrize("factor, trained", [(8.0, 64), pytest.param(32.0, 256, marks=pytest.mark.full)])
def test_rotary_embeddings_are_scaled_as_in_llama_3(tmp_path: Path, factor: float, trained: int) -> None:
    rope = {**LLAMA3, "factor": factor, "original_max_position_embeddings": trained}
    source, path = make_tiny_gguf("llama", tmp_path, num_blocks=2, changes={"rope_parameters": rope})
    assert "rope_freqs.weight" in {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert Checkpoint.from_pretrained(str(path)).config.rope_parameters == rope
    assert_equal_to_model(path, source)


def test_long_texts_have_factors_of_their_own(tmp_path: Path) -> None:
    source, path = make_long_rope_gguf(tmp_path)
    assert_equal_to_model(path, source)
    checkpoint = Checkpoint.from_pretrained(str(path))
    own, given = checkpoint.config.rope_parameters, AutoConfig.from_pretrained(source).rope_parameters
    for name in ("short_factor", "long_factor"):
        assert own[name] == pytest.approx(given[name])
    assert checkpoint.short_factor_length == LONG_ROPE_LENGTH


def assert_equal_to_model(path: Path, source: Path, cleared: tuple[str, ...] = ()) -> None:
    """A chain of a file equals the model of `source`, whose parameters with the endings `cleared` are set to zero."""
    library: Any = AutoModelForCausalLM
    with LOADING:
        model = library.from_pretrained(source, dtype=torch.float32)
    token_ids = list(range(5, 45))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(cleared):
                parameter.zero_()
        expected = model(torch.tensor([token_ids])).logits[0]
    checkpoint = Checkpoint.from_pretrained(str(path))
    assert torch.equal(logits(checkpoint, token_ids, [Span(0, 1), Span(1, checkpoint.num_blocks)]), expected)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    source, path = make_tiny_gguf("glm4_moe", tmp_path)
    numbers = np.ones((64, 128), dtype=np.float32)
    more = {f"blk.4.{name}.weight": numbers for name in ("attn_q", "nextn.eh_proj", "nextn.shared_head_head")}
    assert_equal_to_model(rewrite_gguf(path, tmp_path / "next.gguf", tensors=more), source)
    other = rewrite_gguf(path, tmp_path / "odd.gguf", tensors={"blk.5.attn_q.weight": numbers})
    checkpoint = Checkpoint.from_pretrained(str(other))
    with pytest.raises(CheckpointError, match=r"holds the tensor 'blk\.5\.attn_q\.weight', which its glm4_moe model"):
        load_edges(checkpoint, dtype=torch.float32)
    # Some writers promise such blocks in addition to those that they count.
    short = rewrite_gguf(path, tmp_path / "short.gguf", {"glm4moe.block_count": 4})
    with pytest.raises(CheckpointError, match=r"counts block 3 among those that only predict further tokens, and it"):
        Checkpoint.from_pretrained(str(short))


def test_a_file_that_also_sees_is_refused(tmp_path: Path) -> None:
    _, path = make_tiny_gguf("llama", tmp_path, num_blocks=2)
    tower = {"v.blk.0.attn_k.bias": np.ones(64, dtype=np.float32)}
    seeing = rewrite_gguf(path, tmp_path / "seeing.gguf", tensors=tower)
    with pytest.raises(CheckpointError, match=r"next to its model, as Ollama's files do, .*; give a file that llama"):
        Checkpoint.from_pretrained(str(seeing))


@pytest.mark.parametrize(
    "family, biases",
    [
        ("llama", ("attention_bias", "mlp_bias")),
        *(
            pytest.param(family, ("attention_bias",), marks=pytest.mark.kind)
            for family in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text")
        ),
    ],
)
def test_biases_are_served(tmp_path: Path, family: str, biases: tuple[str, ...]) -> None:
    source, path = make_tiny_gguf(family, tmp_path, num_blocks=2, changes=dict.fromkeys(biases, True))
    assert any(tensor.name.endswith(".bias") for tensor in gguf.GGUFReader(path).tensors)
    assert_equal_to_model(path, source)


def test_a_bias_that_only_some_layers_have_is_zero_in_the_others(tmp_path: Path) -> None:
    source, path = make_tiny_gguf("llama", tmp_path, num_blocks=2, changes={"attention_bias": True})
    absent = [f"blk.{block}.attn_output.bias" for block in range(2)]
    rewrite_gguf(path, tmp_path / "some.gguf", tensors=dict.fromkeys(absent))
    assert_equal_to_model(tmp_path / "some.gguf", source, cleared=("o_proj.bias",))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_norm.bias", "blk.1.ffn_gate_inp.weight", "blk.2.attn_norm.weight", "output.bias", "mystery"]
)
def test_a_file_with_a_tensor_that_its_model_does_not_use_is_refused(tmp_path: Path, name: str) -> None:
    _, path = make_tiny_gguf("llama", tmp_path, num_blocks=2)
    rewrite_gguf(path, tmp_path / "more.gguf", tensors={name: np.ones(64, dtype=np.float32)})
    checkpoint = Checkpoint.from_pretrained(str(tmp_path / "more.gguf"))
    for load in (
        lambda: load_span(checkpoint, Span(1, 2), dtype=torch.float32),
        lambda: load_edges(checkpoint, dtype=torch.float32),
    ):
        with pytest.raises(CheckpointError, match=f"holds the tensor '{name}', which its llama model does not use"):
            load()


@pytest.mark.parametrize(
    "settings, lost, sentence",
    [
        (
            {"llama.feed_forward_length": 100},
            {},
            r"down_proj\.weight in the shape \[64, 96\] where the model in its settings has \[64, 100\]; convert",
        ),
        (
            {},
            {"blk.1.ffn_up.weight": None},
            r"lacks 1 tensors of the model in its settings, .*up_proj\.weight among them; convert",
        ),
    ],
)
def test_a_file_whose_tensors_do_not_fit_its_settings_is_refused(
    tmp_path: Path, settings: dict[str, Any], lost: dict[str, None], sentence: str
) -> None:
    _, path = make_tiny_gguf("llama", tmp_path, num_blocks=2)
    checkpoint = Checkpoint.from_pretrained(str(rewrite_gguf(path, tmp_path / "odd.gguf", settings, lost)))
    with pytest.raises(CheckpointError, match=sentence):
        load_span(checkpoint, Span(0, 2), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_numbers_in_blocks_are_what_the_format_says(tmp_path: Path, kind: str) -> None:
    _, path = make_tiny_gguf("llama", tmp_path, kind=kind, num_blocks=1)
    checkpoint = Checkpoint.from_pretrained(str(path))
    reader = gguf.GGUFReader(path)
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight")
    expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    span = load_span(checkpoint, Span(0, 1), dtype=torch.float32)
    held: Any = next(module.down_proj for module in span.modules() if hasattr(module, "down_proj"))
    assert torch.equal(held.weight, expected.float())


@pytest.mark.parametrize("number", TYPES)
def test_every_type_is_expanded_as_the_package_gguf_does(tmp_path: Path, number: int) -> None:
    name, block_weights, block_bytes = TYPES[number]
    random = np.random.default_rng(number)
    num_blocks = 24
    raw = random.integers(0, 256, num_blocks * block_bytes, dtype=np.uint8)
    if name in ("F32", "F16", "BF16"):
        raw = np.frombuffer(random.standard_normal(num_blocks, dtype=np.float32).tobytes(), dtype=np.uint8)
        raw = raw[: num_blocks * block_bytes]
    (tmp_path / "raw").write_bytes(bytes(7) + raw.tobytes())
    tensor = GgufTensor(tmp_path / "raw", (2, num_blocks // 2 * block_weights), number, 7, raw.nbytes)
    rows = raw.reshape(2, -1)
    with np.errstate(all="ignore"):
        if name in ("F32", "F16"):
            expected = rows.view({"F32": np.float32, "F16": np.float16}[name]).astype(np.float32)
        else:
            expected = gguf.dequantize(rows, gguf.GGMLQuantizationType(number))
    np.testing.assert_allclose(expanded(tensor).numpy(), expected, rtol=1e-6, equal_nan=True)


def test_the_tokenizer_and_what_ends_an_answer_come_from_the_file(tmp_path: Path) -> None:
    source, path = make_tiny_gguf("llama", tmp_path)
    checkpoint = Checkpoint.from_pretrained(str(path))
    tokenizers: list[Any] = [AutoTokenizer.from_pretrained(folder) for folder in (source, checkpoint.folder)]
    text = "the thin man<|end|> and <|user|>so on"
    assert len({tuple(each.encode(text)) for each in tokenizers}) == 1
    assert len({each.chat_template for each in tokenizers}) == 1
    assert checkpoint.generation_config().eos_token_id == [tokenizers[0].eos_token_id]


def test_two_files_have_two_fingerprints_and_one_file_has_one_wherever_it_lies(tmp_path: Path) -> None:
    paths = [make_tiny_gguf("llama", tmp_path / kind, kind=kind)[1] for kind in ("Q8_0", "Q4_0")]
    moved = tmp_path / "elsewhere.gguf"
    moved.write_bytes(paths[0].read_bytes())
    fingerprints = [Checkpoint.from_pretrained(str(path)).fingerprint("float32") for path in (*paths, moved)]
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
