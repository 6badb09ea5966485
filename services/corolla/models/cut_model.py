"""Builds a family's own model with only some of its layers: it is cut before any weight is read, then filled."""

import contextlib
import copy
import functools
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from corolla.chassis.errors import CheckpointError
from corolla.chassis.weight_formats import PACKED
from corolla.models.checkpoint import Checkpoint
from corolla.models.chunked_reads import ChangeModule, ChunkedTensor, read_deferred
from corolla.models.empty_model import cut_class, without_weights
from corolla.models.families import FAMILIES, Family, recurrent_layers
from corolla.models.loading import LOADING
from corolla.models.merged_experts import merged, renamed_by
from corolla.models.packed.choice import fill, layouts_of
from corolla.models.packed.modules import replace_packed
from corolla.models.wrappers import Form

# The lists of a configuration with one entry per layer, which a base model's forward indexes by the layer's number.
PER_LAYER_LISTS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "no_rope_layers",
    "layer_rope_theta",
    "num_attention_heads_per_layer",
    "indexer_types",
)
CPU: Final = torch.device("cpu")
_MOST_OF_A_BYTE: Final = 4
_MOST_TABLE_BYTES: Final = 1 << 27
LAYER_INDEX_NAMES = ("layer_idx", "layer_id")
# The standard deviation of random weights; most families are initialised with it.
_SPREAD: Final = 0.02
# Random weights repeat after this many numbers, a prime, so that the rows of a matrix, and thereby experts, differ.
# Drawing all weights of a block could take minutes, and twice its memory in float32.
_NUM_MADE_UP: Final = (1 << 20) - 3


def build(
    checkpoint: Checkpoint,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    tensors: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device = CPU,
    changing: Callable[[nn.Module], ChangeModule | None] = lambda model: None,
    empty: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Builds a model on the meta device and fills it with `tensors`.

    Args:
        device: where the model shall lie. On another device than a CPU, large tensors are read straight to it.
        changing: returns what changes each module of the model once it is filled; None: nothing does. On another device
            than a CPU, a module is changed before the next one is read.
        empty: such a model without weights; None: one is built.

    Raises:
        CheckpointError: the tensors do not fill the model exactly, or some are left over.
    """
    settings, advice = _advice_on(checkpoint)
    try:
        with _quietly():
            tensors = merged(empty or without_weights(model_class, config), tensors)
            chunked = {name: ChunkedTensor(stored, dtype) for name, stored in tensors.items()}
            prepare = functools.partial(_prepare, chunked=chunked, dtype=dtype, device=device)
            model, report = _fill(cut_class(model_class, prepare), config, chunked, dtype)
    except RuntimeError as error:
        raise CheckpointError(f"The weights of {checkpoint.name} do not fit its {settings}; {advice}.") from error
    for name, own, wanted in sorted(report["mismatched_keys"]):
        raise _other_shape(checkpoint, name, own, wanted)
    missing = sorted(report["missing_keys"])
    if missing:
        if checkpoint.gguf is None and missing[0] in (model_class._tied_weights_keys or ()):
            advice = f'{advice}, or set "tie_word_embeddings" to true in config.json if its head is its embedding'
        raise CheckpointError(
            f"{checkpoint.name} lacks {len(missing)} tensors of the model in its {settings}, {missing[0]} among them; "
            f"{advice}."
        )
    refuse_leftovers(checkpoint, report["unexpected_keys"], model_class)
    model.eval().requires_grad_(False)
    change = changing(model)
    if device != CPU:
        read_deferred(model, chunked.values(), device, change)
    else:
        change_modules(model, change)
    return model


def change_modules(model: nn.Module, change: ChangeModule | None) -> None:
    """Changes each module of a model in turn, if there is a change."""
    if change is not None:
        for module in list(model.modules()):
            change(module)


def refuse_absurd(checkpoint: Checkpoint, model: nn.Module, names: Mapping[str, str]) -> None:
    """Refuses a configuration whose model is not the one of the stored tensors, before memory is taken for it.

    Args:
        model: the model on the meta device.
        names: maps names of the model's tensors to stored names.

    Raises:
        CheckpointError: a tensor has another shape, or the model has far more numbers than there are bytes for.
    """
    wanted, stored = model.state_dict(), checkpoint.stored(names.values())
    if checkpoint.quantization is None and checkpoint.form is not Form.JOINED:
        for name, given in names.items():
            own = stored[given].shape if name in wanted and given in stored else ()
            if own and own != tuple(wanted[name].shape):
                raise _other_shape(checkpoint, name, own, tuple(wanted[name].shape))
    num_bytes = sum(each.num_bytes for each in stored.values())
    num_numbers = sum(tensor.numel() for tensor in model.parameters())
    num_table_bytes = sum(tensor.nbytes for tensor in model.buffers())
    # No format has more than four numbers in a byte. Masks and rotary tables are not stored.
    if stored and num_numbers + num_table_bytes > _MOST_OF_A_BYTE * num_bytes + _MOST_TABLE_BYTES:
        raise CheckpointError(
            f"The settings of {checkpoint.name} make a model of {num_numbers} numbers and {num_table_bytes} bytes of "
            f"tables, for which the checkpoint has {num_bytes} bytes; correct config.json."
        )


def _other_shape(checkpoint: Checkpoint, name: str, own: Sequence[int], wanted: Sequence[int]) -> CheckpointError:
    settings, advice = _advice_on(checkpoint)
    return CheckpointError(
        f"{checkpoint.name} has {name} in the shape {list(own)} where the model in its {settings} has {list(wanted)}; "
        f"{advice}."
    )


def _advice_on(checkpoint: Checkpoint) -> tuple[str, str]:
    """Says where the model's settings stand, and what to do if its tensors belong to another model."""
    if checkpoint.gguf is not None:
        return "settings", "convert the model again, or give it as safetensors"
    return "config.json", "correct config.json, or give a checkpoint that fits it"


def build_cut(
    checkpoint: Checkpoint,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    cut_to: Callable[[Any], None],
    names: Mapping[str, str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str,
    changing: Callable[[nn.Module], ChangeModule | None] = lambda model: None,
) -> PreTrainedModel:
    """Builds a cut model and fills it with the tensors `names`, some of which may stay packed.

    See `build` for `changing` and for what is raised.
    """

    def cut(model: PreTrainedModel) -> None:
        cut_to(model)
        replace_packed(model, layouts, dtype, device)

    # transformers takes about a millisecond for each layer of an empty model, so one model serves all that ask for it.
    empty = without_weights(cut_class(model_class, cut_to), config)
    refuse_absurd(checkpoint, empty, names)
    with checkpoint.open_tensors(names, dtype) as tensors:
        if checkpoint.gguf is None and quantization == PACKED:
            tensors = merged(empty, tensors)
        layouts = layouts_of(checkpoint, names, quantization, device, lambda: empty, tensors)
        expanded = {name: tensor for name, tensor in tensors.items() if name not in layouts}
        model = build(
            checkpoint, cut_class(model_class, cut), config, expanded,
            dtype=dtype, device=device, changing=changing, empty=None if layouts else empty,
        )  # fmt: skip
        fill(model, checkpoint, layouts, names, tensors, device)
    return cast(PreTrainedModel, cast(Any, model).to(device))


def _prepare(
    model: PreTrainedModel, chunked: Mapping[str, ChunkedTensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Decides when each tensor is read, and its dtype in memory."""
    _widen(model, chunked, dtype)
    if device == CPU:
        return
    renamed = renamed_by(model)
    for stored, tensor in chunked.items():
        # Where several tensors become one, transformers needs their numbers.
        tensor.is_deferred = renamed(stored)[1] is None


def _widen(model: PreTrainedModel, chunked: Mapping[str, ChunkedTensor], dtype: torch.dtype) -> None:
    """Gives each tensor the dtype in which the model keeps it, often float32 for routers, as `from_pretrained` does."""
    library = cast(Any, model)
    plan = {re.compile(pattern.replace("*", ".*")): kept for pattern, kept in library._get_dtype_plan(dtype).items()}
    state = model.state_dict()
    dtypes = {
        name: next((kept for pattern, kept in plan.items() if pattern.search(name)), empty.dtype)
        for name, empty in state.items()
    }
    if set(dtypes.values()) <= {dtype}:
        return
    name_of = renaming(model)
    for stored, tensor in chunked.items():
        tensor.dtype = dtypes.get(name_of(stored)) or dtypes.get(stored, dtype)


def kind_of_layer(layer: nn.Module) -> Hashable:
    """What tells a layer from others of its model: its modules, their settings, and the shapes of their weights."""
    return tuple(
        (name, type(module).__name__, _settings_of(module), *(tuple(each.shape) for each in module.parameters(False)))
        for name, module in layer.named_modules()
    )


def _settings_of(module: nn.Module) -> Hashable:
    settings = (
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None) and name not in LAYER_INDEX_NAMES
    )
    return tuple(sorted(settings, key=lambda each: each[0]))


def renaming(model: PreTrainedModel) -> Callable[[str], str]:
    """Returns a function that maps a tensor's name in the files, which may be an older name, to that in the model."""
    renamed = renamed_by(model)
    return lambda stored: renamed(stored)[0]


def make_up(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device = CPU,
    empty: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Builds a model on the meta device and fills it at random, without using torch's global random generator.

    Args:
        device: where the model shall lie. Another device than a CPU fills its large tensors itself.
        empty: such a model without weights; None: one is built.
    """
    empty = empty or without_weights(model_class, config)
    source = torch.Generator().manual_seed(0)
    numbers = torch.randn(_NUM_MADE_UP, generator=source).mul_(_SPREAD).to(dtype)
    made_up = _filled if device == CPU else _MadeUp
    tensors = {
        name: ChunkedTensor(made_up(tensor.shape, numbers), dtype)
        for name, tensor in empty.state_dict().items()
        if tensor.is_floating_point()
    }
    prepare = functools.partial(_prepare, chunked=tensors, dtype=dtype, device=device)
    with _quietly(logging.ERROR):
        model, _ = _fill(cut_class(model_class, prepare), config, tensors, dtype)
    model.eval().requires_grad_(False)
    if device == CPU:
        return model
    on_device = numbers.to(device)
    read_deferred(
        model, tensors.values(), device,
        read=lambda deferred: (_filled(each.shape, on_device).to(each.dtype) for each in deferred),
    )  # fmt: skip
    return model


class _MadeUp:
    """Like the result of `_filled`, but only made when it is indexed; it has the interface of safetensors' slices."""

    def __init__(self, shape: torch.Size, numbers: Tensor) -> None:
        self._shape = shape
        self._numbers = numbers

    def get_shape(self) -> torch.Size:
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        return _filled(self._shape, self._numbers)[index]


def _filled(shape: Sequence[int], numbers: Tensor) -> Tensor:
    """A tensor of this shape, filled with these numbers over and over, on their device."""
    tensor = torch.empty(shape, dtype=numbers.dtype, device=numbers.device)
    for chunk in torch.split(tensor.view(-1), len(numbers)):
        chunk.copy_(numbers[: len(chunk)])
    return tensor


def _fill(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    tensors: Mapping[str, Any],
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The filled model, and transformers' report of missing and mismatched tensors, which got random values."""
    # transformers draws random numbers for some tensors of families with recurrent states before it reads them from the
    # file. `fork_rng` restores torch's global generator at the end. Other threads then draw those numbers again that
    # they drew meanwhile, so families without recurrent states, which need no random numbers, do without `fork_rng`.
    drawing = torch.random.fork_rng(devices=[]) if recurrent_layers(config) else contextlib.nullcontext()
    with LOADING, drawing:
        filled = cast(Any, model_class).from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype,
            attn_implementation="sdpa" if model_class._supports_sdpa else "eager",
            output_loading_info=True,
            # The report then names them, and `build` refuses them.
            ignore_mismatched_sizes=True,
        )
    return cast(tuple[PreTrainedModel, Mapping[str, Any]], filled)


def keep_layers_of_config(config: PretrainedConfig, indices: range) -> None:
    """Cuts the configuration, in place, to the layers `indices`."""
    lists = {name: getattr(config, name, None) for name in PER_LAYER_LISTS if name not in config.attribute_map}
    kept = {name: [entries[index] for index in indices] for name, entries in lists.items() if entries is not None}
    computed = [name for name in kept if isinstance(getattr(type(config), name, None), property)]
    if computed:
        # The family computes these lists from layers' numbers in the whole model, so they become plain attributes.
        config.__class__ = type(type(config).__name__, (type(config),), dict.fromkeys(computed))
    config.num_hidden_layers = len(indices) * FAMILIES[str(config.model_type)].past.attentions
    for name, entries in kept.items():
        setattr(config, name, entries)


def keep_layers(base: PreTrainedModel, family: Family, indices: range) -> None:
    """Cuts a base model, in place, to the layers `indices`, and renumbers them from 0."""
    layers = cast(nn.ModuleList, base.get_submodule(family.layers))
    kept = nn.ModuleList(layers[index] for index in indices)
    for layer in kept:
        for module in layer.modules():
            first = indices.start * (1 if module is layer else family.past.attentions)
            for name in LAYER_INDEX_NAMES:
                if isinstance(index := getattr(module, name, None), int):
                    setattr(module, name, index - first)
    base.set_submodule(family.layers, kept)
    if base.config.is_heterogeneous:
        # transformers makes tables of angles anew once weights are read, for each kind of layers of the whole model.
        whole = copy.deepcopy(base.config)
        for module in base.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                cast(Any, module).config = whole
    keep_layers_of_config(base.config, indices)


@contextlib.contextmanager
def _quietly(least_severe: int | None = None) -> Iterator[None]:
    """Hides transformers' progress bars, and its log lines that are less severe than `least_severe`, if given."""
    library = cast(Any, transformers_logging)
    shows_bars, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    if least_severe is not None:
        library.set_verbosity(least_severe)
    try:
        yield
    finally:
        library.set_verbosity(level)
        if shows_bars:
            library.enable_progress_bar()


# Masks and tables of positions that older releases of transformers saved, and that the code now computes.
_COMPUTED: Final = re.compile(
    r".*\b(rotary_emb\.inv_freq|inv_freq|position_ids|masked_bias|causal_mask|attn\.bias|attention\.bias"
    r"|embed_positions\.weights)"
)
# Scales of keys, values and scores for caches in 8 bits, which are not used here (docs/models.md).
_CACHE_SCALES: Final = re.compile(r".*\.((k|v|q|kv|prob)_scale|(k|v|q)_proj\.(output_scale|output_zero_point))")
# No answer needs these parts: they predict further tokens, or judge an answer in training.
_OTHER_PARTS: Final = re.compile(r"(.*\.)?(mtp|mtp_layers|v_head)\..*")


def refuse_leftovers(checkpoint: Checkpoint, names: Iterable[str], model_class: type[PreTrainedModel]) -> None:
    """Refuses tensors that a model does not use, except for those that change no answer.

    Args:
        names: the names of tensors that the model does not use.
        model_class: the class of transformers, which has regular expressions for names that may be left over.

    Raises:
        CheckpointError: a tensor is left over.
    """
    ignored = model_class._keys_to_ignore_on_load_unexpected or ()
    odd = [
        name
        for name in names
        if not any(known.fullmatch(name) for known in (_COMPUTED, _CACHE_SCALES, _OTHER_PARTS))
        and not any(re.search(each, name) for each in ignored)
    ]
    if odd:
        raise CheckpointError(
            f"{checkpoint.name} holds {len(odd)} tensors that a {checkpoint.family.model_type} model with its "
            f"configuration does not use, {min(odd)} among them, so answers could be others than those it was made "
            "for; correct config.json, or give a checkpoint whose tensors it describes."
        )
