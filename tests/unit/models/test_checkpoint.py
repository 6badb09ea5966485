"""Supported checkpoints open quickly; others are refused with a sentence that says what to do."""

import itertools
import json
import logging
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from corolla.chassis.errors import CheckpointError, UnsupportedFamily
from corolla.models import weights
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.families import FAMILIES
from corolla.models.span_model import load_span, make_span
from corolla.wire.span import Span
from tests.checkpoints import (
    CONTEXT_LENGTH,
    HIDDEN_SIZE,
    LONG_ROPE_LENGTH,
    VOCAB_SIZE,
    make_long_rope_checkpoint,
    make_tiny_checkpoint,
)
from tests.families import family_cases
from tests.tiers import quick

INDEX = "model.safetensors.index.json"
UP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("pristine") / "tiny-llama")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / pristine.name))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))


def edit_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Rewrites the shard that holds a tensor; the index stays as it is."""
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(shard)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, shard, metadata={"format": "pt"})


@pytest.mark.parametrize("family", family_cases())
def test_every_family_is_described(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family, num_blocks=3)))
    facts = (checkpoint.family.model_type, checkpoint.num_blocks, checkpoint.hidden_size, checkpoint.vocab_size)
    assert facts == (family, 3, HIDDEN_SIZE, VOCAB_SIZE)
    assert checkpoint.context_length == CONTEXT_LENGTH
    assert checkpoint.name == family


def test_opening_reads_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def checked_only(shard: Path, framework: str) -> Iterator[None]:
        """A shard without any way to its tensors."""
        with safe_open(shard, framework=framework):
            yield

    monkeypatch.setattr(weights, "safe_open", checked_only)
    checkpoint = Checkpoint.from_pretrained(str(folder))
    assert set(checkpoint.weight_index.values()) == set(shards(folder))


def one_file(folder: Path, change: float = 0.0) -> Path:
    """Writes all tensors of a sharded checkpoint to a single file, too; to each number, `change` is added."""
    tensors = {name: tensor + change for shard in shards(folder) for name, tensor in load_file(shard).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def test_a_single_file_takes_precedence_over_an_index(folder: Path) -> None:
    """The index is what an earlier `save_pretrained` left behind; transformers reads the single file, too."""
    newer = one_file(folder, change=1.0)
    library: Any = AutoModelForCausalLM
    expected = library.from_pretrained(folder, dtype=torch.float32).model.layers[1].mlp.up_proj.weight
    checkpoint = Checkpoint.from_pretrained(str(folder))
    assert set(checkpoint.weight_index.values()) == {newer}
    held: Any = next(
        each for each in load_span(checkpoint, Span(1, 2), dtype=torch.float32).modules() if hasattr(each, "up_proj")
    )
    assert torch.equal(held.up_proj.weight, expected)


def test_a_tensor_that_only_its_shard_names_is_read(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    load_span(Checkpoint.from_pretrained(str(folder)), Span(1, 2), dtype=torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.q_proj.bias",
        "model.layers.2.self_attn.q_norm.weight",
        "model.layers.2.mlp.up_proj.weight_scale",
        "lm_head.bias",
        "model.extra_norm.weight",
        "score.weight",
    ],
)
def test_a_tensor_that_its_model_does_not_use_is_refused(folder: Path, name: str) -> None:
    shard = shards(folder)[0]
    save_file({**load_file(shard), name: torch.ones(64)}, shard, metadata={"format": "pt"})
    checkpoint = Checkpoint.from_pretrained(str(folder))
    load: Callable[[], object] = partial(load_edges, checkpoint, dtype=torch.float32)
    said = name
    if ".layers." in name:
        load, said = partial(load_span, checkpoint, Span(0, 5), dtype=torch.float32), name.removeprefix("model.")
    with pytest.raises(CheckpointError) as refused:
        load()
    assert refused.value.message == (
        f"tiny-llama holds 1 tensors that a llama model with its configuration does not use, {said} among them, so "
        "answers could be others than those it was made for; correct config.json, or give a checkpoint whose tensors "
        "it describes."
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.rotary_emb.inv_freq",
        "model.layers.2.self_attn.masked_bias",
        "model.vision_tower.norm.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.layers.2.self_attn.kv_scale",
        "model.layers.2.self_attn.k_proj.k_scale",
        "model.layers.2.self_attn.attn.prob_scale",
        "model.layers.2.self_attn.v_proj.output_scale",
        "v_head.summary.weight",
    ],
)
def test_a_tensor_that_changes_no_answer_may_be_left_over(folder: Path, name: str) -> None:
    shard = shards(folder)[0]
    save_file({**load_file(shard), name: torch.ones(64)}, shard, metadata={"format": "pt"})
    checkpoint = Checkpoint.from_pretrained(str(folder))
    load_span(checkpoint, Span(0, 5), dtype=torch.float32)
    load_edges(checkpoint, dtype=torch.float32)


def test_what_sees_is_named_and_no_part_of_a_fingerprint(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shard, fingerprints = shards(folder)[0], {Checkpoint.from_pretrained(str(folder)).fingerprint("float32")}
    tensors = load_file(shard)
    for number in (1.0, 2.0):
        tower = {"model.vision_tower.norm.weight": torch.full((64,), number)}
        save_file({**tensors, **tower}, shard, metadata={"format": "pt"})
        with caplog.at_level(logging.INFO):
            checkpoint = Checkpoint.from_pretrained(str(folder))
        fingerprints.add(checkpoint.fingerprint("float32"))
    assert len(fingerprints) == 1
    assert [record.unread for record in caplog.records if hasattr(record, "unread")] == ["vision_tower"] * 2


@pytest.mark.parametrize(
    "place, name",
    [
        ("models--org--tiny-llama/snapshots/" + "0a" * 20, "org/tiny-llama"),
        ("models--tiny-llama/snapshots/main", "tiny-llama"),
        ("my-model", "my-model"),
    ],
)
def test_a_model_has_the_name_that_people_gave_it(folder: Path, tmp_path: Path, place: str, name: str) -> None:
    """A link has its own name, and a revision in the cache of the hub has the repository's."""
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).symlink_to(folder)
    assert Checkpoint.from_pretrained(str(tmp_path / place)).name == name


def test_a_checkpoint_in_one_file_needs_no_index(folder: Path) -> None:
    sharded = Checkpoint.from_pretrained(str(folder))
    fingerprint = sharded.fingerprint("float32")
    rewritten(str)(folder)
    whole = Checkpoint.from_pretrained(str(folder))
    assert set(whole.weight_index) == set(sharded.weight_index)
    assert whole.fingerprint("float32") == fingerprint, "how the tensors are spread over files changes no result"


Damage = Callable[[Path], object]
WEIGHTS = ("*.safetensors", INDEX)


def config(**changes: Any) -> Damage:
    return lambda folder: edit_json(folder / "config.json", **changes)


def written(content: str | bytes, *names: str, instead_of: Sequence[str] = ()) -> Damage:
    """Removes files of some patterns, then writes files with a content."""

    def change(folder: Path) -> None:
        without(*instead_of)(folder)
        for name in names:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def without(*patterns: str) -> Damage:
    def change(folder: Path) -> None:
        for path in [path for pattern in patterns for path in folder.glob(pattern)]:
            path.unlink()

    return change


def of_a_shard(number: int, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: shards(folder)[number].write_bytes(change(shards(folder)[number].read_bytes()))


def point_index_outside(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map={name: f"../{file}" for name, file in weight_map.items()})


def rewritten(name_of: Callable[[str], str | None]) -> Damage:
    """Writes all tensors to one file under other names; None: the tensor is left out."""

    def rewrite(folder: Path) -> None:
        tensors = {name_of(name): each for shard in shards(folder) for name, each in load_file(shard).items()}
        without(*WEIGHTS)(folder)
        kept = {name: each for name, each in tensors.items() if name is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def headless_and_seeing(folder: Path) -> None:
    """The head of a model that sees is missing, though it is not tied."""
    config(vision_config={}, tie_word_embeddings=False)(folder)
    rewritten(lambda name: None if name.startswith("lm_head") else name)(folder)


MLX = {"group_size": 64, "bits": 4}
CUT_SHORT = r"damaged or cut short; delete it and fetch"
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 64
}
OF_MLX = r"the format of MLX are not served; give the original checkpoint"


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (of_a_shard(1, lambda content: content[:-100]),
         "FOLDER/model-00002-of-00005.safetensors is damaged or cut short; delete it and fetch the checkpoint again."),
        (of_a_shard(0, lambda content: content[:8] + b"x" * 32 + content[40:]),
         "FOLDER/model-00001-of-00005.safetensors is damaged or cut short; delete it and fetch the checkpoint again."),
        (of_a_shard(0, lambda _content: b""),
         "FOLDER/model-00001-of-00005.safetensors is damaged or cut short; delete it and fetch the checkpoint again."),
        (lambda folder: shards(folder)[2].unlink(),
         "FOLDER/model-00003-of-00005.safetensors is missing although model.safetensors.index.json names it; fetch "
         "the checkpoint again."),
        (lambda folder: edit_tensor(folder, UP, lambda _tensor: None),
         "FOLDER/model-00003-of-00005.safetensors lacks the tensor model.layers.2.mlp.up_proj.weight that "
         "model.safetensors.index.json names; fetch the checkpoint again."),
        (config(num_hidden_layers=6),
         "FOLDER has weights of 5 blocks where config.json promises 6; set num_hidden_layers to 5 if the model was "
         "cut, or give the whole checkpoint."),
        (rewritten(lambda name: None if ".layers.2." in name else name),
         "FOLDER has no weights of block 2, and config.json promises 5 blocks; give the whole checkpoint."),
        (config(model_type="gpt2"),
         "FOLDER has no tensors named as the blocks of a gpt2 model (h.0.…); 'lm_head.weight' is among its names. "
         "Correct model_type in config.json, or give a checkpoint in the layout of transformers."),
        (config(num_hidden_layers=100_000_000),
         "FOLDER/config.json sets num_hidden_layers to 100000000, where 1 to 4096 can be served; correct it."),
        (written("{\n\n,", "config.json"),
         "FOLDER/config.json is no JSON from line 3 on; correct it there, or fetch the checkpoint again."),
        (rewritten("_orig_mod.{}".format),
         "FOLDER has names that all begin with '_orig_mod.', which torch.compile, DDP, FSDP or PEFT put there in "
         "training; save the model without that wrapper, or take the beginning off the names."),
        (headless_and_seeing,
         "FOLDER has no head (lm_head), and its config.json says that the head is not the embedding; set "
         "tie_word_embeddings to true there if it is, or give the whole checkpoint."),
        (config(quantization=MLX),
         "Weights in the format of MLX are not served; give the original checkpoint, or one in another format of "
         "docs/models.md."),
        (config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 0}),
         "config.json has a group_size that makes no sense; correct it, or give the original checkpoint."),
        (written('{"weight_map": ', INDEX),
         "FOLDER/model.safetensors.index.json is damaged; fetch the checkpoint again."),
        (point_index_outside,
         "FOLDER/model.safetensors.index.json names a file outside its folder; fetch a checkpoint that you trust."),
        (without(INDEX),
         "FOLDER holds 5 safetensors files but no model.safetensors.index.json; fetch the missing index file."),
        (written(b"\x80\x04.", "pytorch_model.bin", instead_of=WEIGHTS),
         "FOLDER holds only pickled weights (pytorch_model.bin), which can run code when loaded; convert them to "
         "safetensors with `save_pretrained` on a machine that you can lose, or take a revision with safetensors."),
        (without(*WEIGHTS), "FOLDER holds no safetensors weights; point to a complete checkpoint folder."),
        (without("config.json"), "FOLDER has no config.json; point to a complete checkpoint folder."),
        (written("[]", "config.json"),
         "FOLDER/config.json holds no table of settings; give the file that save_pretrained writes."),
        (written("{}", "adapter_config.json", instead_of=["config.json"]),
         "FOLDER holds an adapter and no model; give its base model, and add it by `corolla adapters add`."),
        (written("{}", "adapter_config.json", "adapter_model.safetensors"),
         "FOLDER holds an adapter (adapter_config.json) next to a model, to which transformers would apply it; move "
         "it elsewhere, and add it by `corolla adapters add`."),
        (written(b"GGUF", "tiny.Q8_0.GGUF", instead_of=["*"]),
         "FOLDER holds GGUF files, and a GGUF file is given by its own name; give FOLDER/tiny.Q8_0.GGUF."),
        (written(b"GGUF", "mmproj-f16.gguf", "a-mmproj.gguf", "tiny.Q8_0.gguf", instead_of=WEIGHTS),
         "FOLDER holds GGUF files, and a GGUF file is given by its own name; give FOLDER/tiny.Q8_0.gguf."),
        (config(transformers_weights="other.safetensors"),
         "config.json names the weights' file in transformers_weights ('other.safetensors'), which is not served; "
         "rename the file to model.safetensors, and remove that field."),
        (config(quantization_config={}),
         "config.json has a quantization_config without a quant_method, so nothing says how weights are packed; "
         "remove it if they are not, or give the original checkpoint, or one in another format of docs/models.md: "
         "auto-round, awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt, modelopt_fp4, mxfp4."),
        (written('{"quantization": {"quant_algo": "W4A8_AWQ"}}', "hf_quant_config.json"),
         "ModelOpt's weights of the type 'W4A8_AWQ' are not served; give the original checkpoint, or one in another "
         "format of docs/models.md."),
        (written('{"group": 128}', "quantize_config.json"),
         "the checkpoint has a quantize_config.json without a quant_method, so nothing says how weights are packed; "
         "remove it if they are not, or give the original checkpoint, or one in another format of docs/models.md: "
         "auto-round, awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt, modelopt_fp4, mxfp4."),
        (config(num_attention_heads="four"),
         "FOLDER/config.json does not describe a model that transformers knows; correct it: Validation error for "
         "field 'num_attention_heads': TypeError: Field 'num_attention_heads' expected int, got str (value: 'four')"),
        (config(quantization_config={"quant_method": "aqlm", "bits": 2}),
         "Weights quantised by 'aqlm' are not served; give the original checkpoint, or one in another format of "
         "docs/models.md: auto-round, awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt, "
         "modelopt_fp4, mxfp4."),
    ],
)  # fmt: skip
def test_a_bad_checkpoint_is_refused(folder: Path, damage: Damage, sentence: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.from_pretrained(str(folder))
    assert refused.value.message.replace(str(folder), "FOLDER") == sentence


def test_factors_that_change_nothing_are_no_reason_to_refuse(folder: Path) -> None:
    edit_json(folder / "config.json", logit_scale=1.0, final_logit_softcapping=0.0, clip_qkv=None)
    Checkpoint.from_pretrained(str(folder))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"model_type": "t5", "architectures": None},
         "Models of type 't5' are not supported; docs/families.md lists the N types that are."),
        ({"model_type": "of-nobody", "architectures": ["Own"]},
         "Models of type 'of-nobody' are not supported: transformers VERSION has no class for it, though a later "
         "release may; docs/families.md lists the N types that are."),
        ({"model_type": "of-nobody", "auto_map": {"AutoConfig": "code.Config"}},
         "Models of type 'of-nobody' are not supported, but config.json names the architecture of 'llama'; set "
         "model_type to it there if its tensors and settings are the same."),
        ({"model_type": None, "architectures": None},
         "config.json names no model_type; docs/families.md lists the N types that are."),
        ({"model_type": "gemma3n", "architectures": None, "text_config": {"model_type": "gemma3n_text",
         "num_hidden_layers": 5}},
         "Models of type 'gemma3n_text' are not supported: blocks take inputs made from token ids, and keys and "
         "values of other blocks; docs/families.md lists the N types that are."),
        ({"model_type": "glm_moe_dsa", "architectures": None, "indexer_types": ["full", "shared", "full", "full",
         "full"]},
         "Some blocks of this glm_moe_dsa model attend to the tokens that an earlier block has picked "
         "(indexer_types), which is not served; choose another checkpoint."),
        ({"rope_parameters": {"rope_type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
         "'llama' models of transformers have no rotary embedding of the type 'mrope'; set rope_type in config.json "
         "to 'default', which is the same for text."),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
         "'llama' models of transformers have no rotary embedding of the type 'spiral'; set rope_type in config.json "
         "to one that transformers knows."),
        ({"is_encoder_decoder": True}, "Only decoder-only models are supported; this checkpoint has an encoder."),
        ({"rope_parameters": DYNAMIC},
         "The rotary embedding 'dynamic' keeps state between calls, so sessions would disturb each other; set "
         "another rope_type (for example 'linear' or 'yarn') in config.json."),
        ({"model_type": "hunyuan_v1_dense", "rope_parameters": DYNAMIC},
         "The rotary embedding 'dynamic' keeps state between calls, so sessions would disturb each other; set "
         "another rope_type (for example 'linear' or 'yarn') in config.json."),
        ({"model_type": "opt", "do_layer_norm_before": False},
         "Checkpoints of the family 'opt' are supported only with do_layer_norm_before=True; choose another one."),
    ],
)  # fmt: skip
def test_an_unsupported_model_is_refused(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedFamily) as refused:
        Checkpoint.from_pretrained(str(folder))
    said = refused.value.message.replace(f" {len(FAMILIES)} types", " N types")
    assert said.replace(transformers.__version__, "VERSION") == sentence


@pytest.mark.parametrize(
    "family, lengths",
    [("phi3", (CONTEXT_LENGTH, LONG_ROPE_LENGTH)), ("phimoe", (CONTEXT_LENGTH, LONG_ROPE_LENGTH)),
     ("llama", (LONG_ROPE_LENGTH, None)), ("qwen3", (LONG_ROPE_LENGTH, None))],
)  # fmt: skip
def test_long_texts_are_for_families_that_begin_them_anew(
    tmp_path: Path, family: str, lengths: tuple[int, int | None]
) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_long_rope_checkpoint(family, tmp_path / family)))
    assert (checkpoint.context_length, checkpoint.short_factor_length) == lengths


@pytest.mark.parametrize(
    "scaling, length",
    [
        ({"rope_type": "yarn", "factor": 4.0}, 4 * CONTEXT_LENGTH),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, CONTEXT_LENGTH),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT_LENGTH}, 4 * CONTEXT_LENGTH),
        ({"rope_type": "linear", "factor": 4.0}, 4 * CONTEXT_LENGTH),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 64}, CONTEXT_LENGTH),
        ({"type": "linear", "factor": 2}, 2 * CONTEXT_LENGTH),
        (LLAMA3, CONTEXT_LENGTH),
        ({"rope_type": "default"}, CONTEXT_LENGTH),
    ],
)
def test_factors_make_the_context_longer(folder: Path, scaling: dict[str, Any], length: int) -> None:
    edit_json(folder / "config.json", rope_parameters={**scaling, "rope_theta": 10000.0})
    assert Checkpoint.from_pretrained(str(folder)).context_length == length


def test_a_length_that_a_family_states_for_stretched_layers_stays(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("gemma3_text", tmp_path / "gemma3")
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    edit_json(
        folder / "config.json",
        rope_parameters={
            "full_attention": linear,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert Checkpoint.from_pretrained(str(folder)).context_length == CONTEXT_LENGTH


def test_where_no_text_is_long_there_are_no_long_factors(tmp_path: Path) -> None:
    folder = make_long_rope_checkpoint("phi3", tmp_path / "phi3", max_position_embeddings=LONG_ROPE_LENGTH)
    assert Checkpoint.from_pretrained(str(folder)).short_factor_length is None


# Blocks that are alike, dense ones before those with experts or among them, and recurrent ones of either size.
SIZES = ("llama", "mixtral", "qwen2_moe", "deepseek_v3", "ernie4_5_moe", "opt", "lfm2", "lfm2_moe", "qwen3_next")


@pytest.mark.parametrize("family", family_cases(kept=SIZES))
def test_no_block_is_larger_than_what_is_planned_by(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family)))
    # Buffers are left out: masks and rotary tables are not stored, and biases of routers are small.
    blocks = [load_span(checkpoint, Span(block, block + 1), dtype=torch.float32) for block in range(5)]
    sizes = [sum(own.nbytes for part in block.modules() for own in part.parameters(recurse=False)) for block in blocks]
    assert max(sizes[block] for block in checkpoint.largest_blocks) == max(sizes)
    assert checkpoint.largest_block in checkpoint.largest_blocks
    head = checkpoint.vocab_size * checkpoint.hidden_size * torch.float32.itemsize
    assert checkpoint.head_blocks() == pytest.approx(head / max(sizes), rel=0.02)


@pytest.mark.parametrize(
    "name, advice",
    [
        ("./nowhere", r"There is no folder \./nowhere; check the path"),
        ("/no/such/folder", r"There is no folder /no/such/folder; check the path"),
        ("nobody/no-such-model", r"'nobody/no-such-model' is not a local folder, .* give a local folder"),
        ("", r"No model is named; give"),
    ],
)
def test_a_missing_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=advice):
        Checkpoint.from_pretrained(name)


def test_a_file_is_no_checkpoint(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a GGUF file; point to one, or to the folder"):
        Checkpoint.from_pretrained(str(folder / "config.json"))


def unnamed(folder: Path) -> None:
    edit_tensor(folder, UP, lambda _tensor: None)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    del weight_map[UP]
    edit_json(folder / INDEX, weight_map=weight_map)


def of_the_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda folder: edit_tensor(folder, UP, change)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (unnamed,
         "tiny-llama lacks 1 tensors of the model in its config.json, layers.1.mlp.up_proj.weight among them; "
         "correct config.json, or give a checkpoint that fits it."),
        (of_the_tensor(lambda tensor: tensor[:-1].contiguous()),
         "tiny-llama has layers.1.mlp.up_proj.weight in the shape [95, 64] where the model in its config.json has "
         "[96, 64]; correct config.json, or give a checkpoint that fits it."),
        (of_the_tensor(lambda tensor: tensor.to(torch.uint8)),
         "The weight layers.1.mlp.up_proj.weight is stored as U8, and neither config.json nor hf_quant_config.json, "
         "quantize_config.json, quant_config.json says how to read it; give the original checkpoint, or one that "
         "describes its quantisation."),
        (of_the_tensor(lambda tensor: tensor.to(torch.float8_e4m3fn)),
         "The weight layers.1.mlp.up_proj.weight is stored as F8_E4M3, and neither config.json nor "
         "hf_quant_config.json, quantize_config.json, quant_config.json says how to read it; give the original "
         "checkpoint, or one that describes its quantisation."),
        (config(hidden_act="of-tomorrow"),
         "The code of llama models in transformers cannot build what config.json describes (KeyError: "
         "'of-tomorrow'); correct it."),
    ],
)  # fmt: skip
def test_a_checkpoint_of_which_only_loading_shows_a_fault_is_refused(
    folder: Path, damage: Damage, sentence: str
) -> None:
    damage(folder)
    checkpoint = Checkpoint.from_pretrained(str(folder))
    with pytest.raises(CheckpointError) as refused:
        load_span(checkpoint, Span(1, 3), dtype=torch.float32)
    assert refused.value.message == sentence


def numbers_of(settings: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each number within a configuration; of lists, of their first entry."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from numbers_of(value, (*path, key))
    elif isinstance(settings, list) and settings:
        yield from numbers_of(settings[0], (*path, 0))
    elif isinstance(settings, int | float) and not isinstance(settings, bool):
        yield path


@contextmanager
def one_more_gib() -> Iterator[None]:
    """This process cannot take more than another gigabyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# Blocks with experts, masks of all positions, latents, states, own names of sizes, and sizes within tables.
ABSURD = ("bloom", "dbrx", "deepseek_v3", "falcon_h1", "gemma3_text", "gpt2", "gpt_bigcode", "llama", "qwen3_next")


@pytest.mark.parametrize("family", quick(ABSURD, "llama"))
def test_an_absurd_number_is_refused_by_a_sentence_or_takes_no_memory(tmp_path: Path, family: str) -> None:
    """Each number of the configuration, one by one, is far too large, or negative."""
    folder = make_tiny_checkpoint(family, tmp_path / family)
    original = (folder / "config.json").read_text()
    refused = set()
    for path, absurd in zip(numbers_of(json.loads(original)), itertools.cycle((10**15, -1, 10**8)), strict=False):
        settings = place = json.loads(original)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = absurd
        (folder / "config.json").write_text(json.dumps(settings))
        with suppress(CheckpointError, UnsupportedFamily), one_more_gib():
            refused.add(path)
            checkpoint = Checkpoint.from_pretrained(str(folder))
            make_span(checkpoint, Span(0, 1), dtype=torch.float32)
            load_edges(checkpoint, dtype=torch.float32)
            refused.remove(path)
    names = {str(path[-1]) for path in refused}
    assert names & {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
    assert names & {"hidden_size", "n_embd", "d_model"}


def test_a_fingerprint_is_stable_and_short(pristine: Path, folder: Path) -> None:
    fingerprint = Checkpoint.from_pretrained(str(pristine)).fingerprint("float32")
    assert fingerprint == Checkpoint.from_pretrained(str(folder)).fingerprint("float32")
    assert len(fingerprint) == 16
    int(fingerprint, 16)


def another_number(index: int) -> Damage:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[index] += 1.0
        return tensor

    return lambda folder: edit_tensor(folder, "model.layers.4.self_attn.o_proj.weight", change)


@pytest.mark.parametrize(
    "change, numbers",
    [
        (without(), ("bfloat16",)),
        (without(), ("float32", "int8")),
        *((another_number(index), ("float32",)) for index in (0, HIDDEN_SIZE * HIDDEN_SIZE // 2, -1)),
        (config(rms_norm_eps=0.1), ("float32",)),
        (written("{{ messages }}", "chat_template.jinja"), ("float32",)),
    ],
    ids=["dtype", "quantization", "beginning", "middle", "end", "config", "tokenizer"],
)
def test_a_fingerprint_distinguishes_checkpoints(
    pristine: Path, folder: Path, change: Damage, numbers: tuple[str, ...]
) -> None:
    change(folder)
    found = Checkpoint.from_pretrained(str(folder)).fingerprint(*numbers)
    assert found != Checkpoint.from_pretrained(str(pristine)).fingerprint("float32")


def test_sampling_defaults_and_the_name_of_the_folder_are_no_part_of_a_fingerprint(
    pristine: Path, folder: Path, tmp_path: Path
) -> None:
    fingerprint = Checkpoint.from_pretrained(str(pristine)).fingerprint("float32")
    edit_json(folder / "generation_config.json", temperature=0.2, top_p=0.5, do_sample=True, max_new_tokens=7)
    renamed = shutil.copytree(folder, tmp_path / "another name")
    assert Checkpoint.from_pretrained(str(renamed)).fingerprint("float32") == fingerprint
    edit_json(folder / "generation_config.json", eos_token_id=9)
    assert Checkpoint.from_pretrained(str(folder)).fingerprint("float32") != fingerprint


def test_the_parts_of_a_fingerprint_say_what_differs(pristine: Path, folder: Path) -> None:
    own = Checkpoint.from_pretrained(str(pristine)).fingerprint_parts("float32")
    edit_json(folder / "tokenizer_config.json", chat_template="another")
    edit_json(folder / "generation_config.json", eos_token_id=9)
    theirs = Checkpoint.from_pretrained(str(folder)).fingerprint_parts("bfloat16")
    assert {name for name in own if own[name] != theirs[name]} == {"dtype", "generation_defaults", "template"}


def test_a_start_reads_the_vocabulary_once(pristine: Path, folder: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(folder))
    checkpoint.fingerprint("float32")
    edit_json(folder / "tokenizer.json", version="another")
    own = Checkpoint.from_pretrained(str(pristine)).fingerprint_parts("float32")
    assert checkpoint.fingerprint_parts("float32") == own
    theirs = Checkpoint.from_pretrained(str(folder)).fingerprint_parts("float32")
    assert {name for name in own if own[name] != theirs[name]} == {"tokenizer"}


def test_a_fingerprint_does_not_depend_on_the_library_that_wrote_the_files(pristine: Path, folder: Path) -> None:
    edit_json(folder / "config.json", transformers_version="0.0", dtype="float16")
    edit_json(folder / "tokenizer_config.json", is_local=False, local_files_only=True)
    assert Checkpoint.from_pretrained(str(folder)).fingerprint("x") == Checkpoint.from_pretrained(
        str(pristine)
    ).fingerprint("x")
