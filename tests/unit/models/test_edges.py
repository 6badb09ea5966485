"""Embedding and head equal what the family's own model computes at its ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from corolla.chassis.errors import CheckpointError, InternalError
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import edge_tensors, load_edges
from corolla.models.families import FAMILIES
from corolla.models.loading import LOADING
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint
from tests.families import family_cases
from tests.gpu_double import a_gpu
from tests.unit.compute.on_gpu import move

NUM_TOKENS = 9
MORE_THAN_A_LOOKUP = {
    name
    for name, each in FAMILIES.items()
    if each.learned_positions or each.bypassed or each.unit_scalars or each.unit_settings
}


class Ends:
    """The input of the unsplit model's first block and the output of its last."""

    def __init__(self, model: Any, layers: str) -> None:
        self.first_input = torch.empty(0)
        self.last_output = torch.empty(0)
        # In transformers, Llama 4's text model names no submodule as its base.
        base = model.base_model if model.base_model is not model else model.model
        blocks = base.get_submodule(layers)
        blocks[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
        blocks[-1].register_forward_hook(self._keep_output)

    def _keep_input(self, _module: Any, arguments: tuple[Tensor, ...], _options: dict[str, Any]) -> None:
        self.first_input = arguments[0][0]

    def _keep_output(self, _module: Any, _arguments: Any, output: Any) -> None:
        self.last_output = (output if isinstance(output, Tensor) else output[0])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", family_cases())
def test_edges_are_bit_equal_to_the_unsplit_model(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / family, num_blocks=2)
    library: Any = AutoModelForCausalLM
    with LOADING:
        unsplit = library.from_pretrained(folder, dtype=dtype).eval()
    ends = Ends(unsplit, FAMILIES[family].layers)
    token_ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    position_ids = torch.arange(NUM_TOKENS)
    with torch.inference_mode():
        logits = unsplit(input_ids=token_ids[None], use_cache=False).logits[0]

    edges = load_edges(Checkpoint.from_pretrained(str(folder)), dtype=dtype)
    embedded = edges.embed(token_ids, position_ids)
    assert embedded.dtype == dtype
    assert torch.equal(embedded, ends.first_input)
    head = edges.head(ends.last_output)
    assert head.dtype == torch.float32
    assert torch.equal(head, logits.float())


@pytest.mark.parametrize("family", family_cases(every=False))
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
def test_one_end_alone_is_that_of_both(tmp_path: Path, family: str, is_tied: bool) -> None:
    folder = make_tiny_checkpoint(
        family, tmp_path / family, num_blocks=2, config_changes={"tie_word_embeddings": is_tied and family != "dbrx"}
    )
    checkpoint = Checkpoint.from_pretrained(str(folder))
    both = load_edges(checkpoint, dtype=torch.float32)
    token_ids, position_ids = torch.tensor([7, 300, 7]), torch.tensor([4, 5, 90])
    first = load_edges(checkpoint, dtype=torch.float32, has_head=False)
    assert torch.equal(first.embed(token_ids, position_ids), both.embed(token_ids, position_ids))
    last = load_edges(checkpoint, dtype=torch.float32, has_embedding=False)
    hidden = torch.randn(3, checkpoint.hidden_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(last.head(hidden), both.head(hidden))
    with pytest.raises(InternalError):
        first.head(hidden)
    with pytest.raises(InternalError):
        last.embed(token_ids, position_ids)
    ends = [set(edge_tensors(checkpoint, **end).values()) for end in ({"has_head": False}, {"has_embedding": False})]
    assert set.union(*ends) == set(edge_tensors(checkpoint).values())
    assert not set.intersection(*ends)


# falcon_h1 scales the embeddings that it looks up, and none that it is given.
@pytest.mark.parametrize("family", family_cases(FAMILIES.keys() - {"falcon_h1"}, every=False))
def test_embeddings_may_be_given(tmp_path: Path, family: str) -> None:
    edges = load_edges(
        Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family, num_blocks=2))),
        dtype=torch.float32,
    )
    token_ids, position_ids = torch.tensor([7, 300, 7]), torch.tensor([4, 5, 90])
    looked_up = edges.modules[0].get_input_embeddings()(token_ids)
    assert torch.equal(edges.embed_given(looked_up, position_ids), edges.embed(token_ids, position_ids))


@pytest.mark.parametrize("family", family_cases(MORE_THAN_A_LOOKUP, kept=("granite_swa",), every=False))
def test_what_a_gpu_embeds_waits_for_nothing(tmp_path: Path, family: str) -> None:
    """A step ahead embeds ids that the device has yet to choose."""
    folder = make_tiny_checkpoint(family, tmp_path / family, num_blocks=2)
    edges = load_edges(Checkpoint.from_pretrained(str(folder)), dtype=torch.float32)
    token_ids, position_ids = torch.tensor([7, 300, 7]), torch.tensor([4, 5, 90])
    expected = edges.embed(token_ids, position_ids)
    with a_gpu() as gpu, torch.inference_mode():
        move(gpu, edges.modules[0].modules())
        edges.find_device()
        given = gpu.put(token_ids), gpu.put(position_ids)
        gpu.waits.clear()
        found = edges.embed(*given)
        assert not gpu.waits
        assert torch.equal(gpu.numbers(found), expected)


def test_learned_positions_are_absolute(tmp_path: Path) -> None:
    edges = load_edges(
        Checkpoint.from_pretrained(str(make_tiny_checkpoint("gpt2", tmp_path / "gpt2"))), dtype=torch.float32
    )
    token = torch.tensor([7])
    assert not torch.equal(edges.embed(token, torch.tensor([0])), edges.embed(token, torch.tensor([3])))


def test_only_the_edges_shards_are_opened(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "llama", num_blocks=12)))
    needed = {checkpoint.weight_index[name] for name in edge_tensors(checkpoint)}
    others = set(checkpoint.weight_index.values()) - needed
    assert others
    for shard in others:
        shard.unlink()
    load_edges(checkpoint, dtype=torch.float32)


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    opened = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "llama")))
    rest = {name: shard for name, shard in opened.weight_index.items() if name != "lm_head.weight"}
    headless = Checkpoint(opened.name, opened.folder, opened.config, opened.family, rest)
    with pytest.raises(CheckpointError, match=r'lm_head\.weight among them; .*"tie_word_embeddings" to true'):
        load_edges(headless, dtype=torch.float32)


def tied(folder: Path, family: str, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A checkpoint with tied ends, whose tensors are changed and written to one file."""
    make_tiny_checkpoint(family, folder, num_blocks=1, config_changes={"tie_word_embeddings": True})
    tensors = {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_ends(folder: Path, embed: Callable[[Tensor], Tensor], head: Callable[[Tensor], Tensor]) -> None:
    """Both ends together, and each of them alone, are these ones."""
    checkpoint, token_ids = Checkpoint.from_pretrained(str(folder)), torch.arange(8)
    for has_both in (True, False):
        first = load_edges(checkpoint, dtype=torch.float32, has_head=has_both)
        last = load_edges(checkpoint, dtype=torch.float32, has_embedding=has_both)
        embedded = first.embed(token_ids, token_ids)
        assert torch.equal(embedded, embed(token_ids))
        assert torch.equal(last.head(embedded), head(embedded))


@pytest.mark.kind
@pytest.mark.parametrize("family", ["opt", "biogpt"])
def test_tied_ends_with_other_names_and_positions_may_be_stored_under_the_heads_name(
    tmp_path: Path, family: str
) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        (stored,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
        tensors["output_projection.weight" if family == "biogpt" else "lm_head.weight"] = tensors.pop(stored)

    plain = Checkpoint.from_pretrained(str(tied(tmp_path / "plain", family, lambda _: None)))
    expected = load_edges(plain, dtype=torch.float32)
    assert_ends(tied(tmp_path / family, family, rename), lambda ids: expected.embed(ids, ids), expected.head)


@pytest.mark.parametrize("stored", ["both", "head alone"])
def test_tied_ends_may_be_stored_under_the_name_of_either(tmp_path: Path, stored: str) -> None:
    """Where both are there and differ, they are not tied; transformers does the same."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = "model.embed_tokens.weight"
        tensors["lm_head.weight"] = tensors[name] * 2.0 if stored == "both" else tensors.pop(name)

    folder = tied(tmp_path / "llama", "llama", change)
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(folder, dtype=torch.float32)
    assert_ends(folder, model.model.embed_tokens, lambda hidden: model.lm_head(model.model.norm(hidden)))
