"""Layers, embeddings and experts that keep their weights packed as in the file, on a CPU or a GPU."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.chassis import heap
from corolla.chassis.errors import CheckpointError, SettingsError
from corolla.kernels.experts import ExpertPanels, can_run, run_experts
from corolla.kernels.layouts import Layout, PlainLayout
from corolla.kernels.llvm_text import LANES
from corolla.kernels.products import kernel_of, multiplied, plain_layout
from corolla.kernels.repacking import Panels, empty_panels, lay_out, unpack
from corolla.kernels.triton.availability import missing
from corolla.models.linear import this_processor
from corolla.models.product_rule import AUTO, Way, way_of
from corolla.models.whole_vectors import in_whole_vectors

if TYPE_CHECKING:
    from corolla.kernels.triton.expert_launches import ChosenExperts
    from corolla.kernels.triton.packed_launches import PanelViews

# Expanding takes many times the memory of so many panels.
_PANELS_AT_ONCE: Final = 32
# A scale of such bytes is a small number, so that products with arbitrary weights stay finite.
_MADE_UP_BYTE: Final = 0x11
# The attribute in which transformers' scaled embeddings keep their factor.
_SCALE: Final = "scalar_embed_scale"


class PackedLinear(nn.Module):
    """Computes `x W^T + b` as `nn.Linear` does, with weights that stay packed.

    On a CPU, rows are multiplied in float32, and the result is rounded to the rows' dtype. Where the processor has
    instructions for bfloat16, rows in bfloat16 are multiplied by these, with float32 sums. A GPU rounds the weights to
    the rows' dtype, and multiplies with float32 sums.

    Args:
        bias: `[out]` or None.

    Attributes:
        panels: uint8 `[panels, blocks, bytes of a block]`, see `repack`; None until they are read.
        order: int32 `[in]` or None, see `Panels`.
        tiled_outputs: see `multiply_packed`.
        expanded: `[out, in]` in the rows' dtype, on a GPU whose kernel fails; then there are no panels. None otherwise.
    """

    panels: Tensor | None
    order: Tensor | None
    expanded: Tensor | None

    def __init__(self, in_features: int, out_features: int, layout: Layout, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.layout = layout
        self.bias = bias
        self.register_buffer("panels", None, persistent=False)
        self.register_buffer("order", None, persistent=False)
        self.tiled_outputs = out_features
        self.register_buffer("expanded", None, persistent=False)
        self._views: PanelViews | None = None

    @classmethod
    def joined(cls, parts: Sequence["PackedLinear"]) -> Self:
        """Joins several layers with the same layout and input into one; their weights become views of the new layer's.

        All parts except the last one must have a multiple of 16 outputs.
        """
        biases = [part.bias for part in parts if part.bias is not None]
        bias = nn.Parameter(torch.cat([each.data for each in biases]), requires_grad=False) if biases else None
        joint = cls(parts[0].in_features, sum(part.out_features for part in parts), parts[0].layout, bias)
        joint.panels = torch.cat([cast(Tensor, part.panels) for part in parts])
        joint.order = parts[0].order
        first = 0
        for part in parts:
            end = first + len(cast(Tensor, part.panels))
            part.panels, part.order = joint.panels[first:end], joint.order
            first = end
        return joint

    @staticmethod
    def can_join(parts: Sequence["PackedLinear"]) -> bool:
        return (
            len({(part.layout, part.in_features, part.bias is None) for part in parts}) == 1
            and not any(part.out_features % LANES for part in parts[:-1])
            and all(_are_equal(part.order, parts[0].order) for part in parts)
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weights, `[out, in]`."""
        return self.out_features, self.in_features

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies `rows`, `[..., in]` on the device of the weights; returns `[..., out]` in the same dtype."""
        if self.expanded is not None:
            return functional.linear(rows, self.expanded, self.bias)
        panels = cast(Tensor, self.panels)
        if panels.device.type == "cpu":
            return multiplied(self.layout, rows, panels, self.out_features, self.bias, self.order)
        return self.on_gpu(rows)

    def on_gpu(self, rows: Tensor) -> Tensor:
        """Does what `forward` does with panels on a GPU.

        Args:
            rows: `[..., in]`, in any float dtype, on the panels' device.

        Returns:
            `[..., out]` in the same dtype, on the same device.
        """
        from corolla.kernels.triton.packed_launches import PanelViews, multiply_packed

        panels = cast(Tensor, self.panels)
        if self._views is None or self._views.panels is not panels:
            self._views = PanelViews.from_panels(panels, self.layout)
        flat = rows.reshape(-1, self.in_features)
        product = multiply_packed(
            self.layout, flat, self._views, self.out_features, self.bias, self.order, self.tiled_outputs
        )
        return product.view(*rows.shape[:-1], self.out_features)

    def expand(self, dtype: torch.dtype) -> None:
        """Replaces the panels by expanded weights in the rows' dtype, on their device."""
        weights = [
            unpack(part, self.layout, len(part) * LANES).to(dtype)
            for part in torch.split(cast(Tensor, self.panels), _PANELS_AT_ONCE)
        ]
        expanded = torch.cat(weights)[: self.out_features]
        if self.order is not None:
            expanded = torch.empty_like(expanded).index_copy_(1, self.order.long(), expanded)
        self.expanded, self.panels, self._views = expanded, None, None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, layout={self.layout.name}"


class PackedEmbedding(nn.Module):
    """Looks rows up as `nn.Embedding` does, with packed weights: only the requested rows are expanded.

    Args:
        scale: the factor of the result.

    Attributes:
        panels: uint8 `[panels, blocks, bytes of a block]`, see `repack`; None until they are read.
    """

    panels: Tensor | None

    def __init__(
        self, num_embeddings: int, embedding_dim: int, layout: Layout, dtype: torch.dtype, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.layout = layout
        self.dtype = dtype
        self.scale = scale
        self.register_buffer("panels", None, persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weights, `[num_embeddings, embedding_dim]`."""
        return self.num_embeddings, self.embedding_dim

    def forward(self, token_ids: Tensor) -> Tensor:
        """Looks up the rows of `token_ids`, int64 `[...]`; returns `[..., embedding_dim]` in `dtype`.

        On a GPU it waits for nothing, so an id that is not within the table has a row of NaN there.

        Raises:
            IndexError: an id is not within the table, on a CPU.
        """
        flat, panels = token_ids.reshape(-1), cast(Tensor, self.panels)
        if panels.device.type == "cpu":
            if bool(((flat < 0) | (flat >= self.num_embeddings)).any()):
                raise IndexError(f"a token id is not within 0:{self.num_embeddings}")
            rows = kernel_of(self.layout, self.dtype).expand(flat, panels, self.embedding_dim).to(self.dtype)
        else:
            from corolla.kernels.triton.packed_launches import expand_packed

            # The kernel reads whatever lies at an id.
            known = flat.clamp(0, self.num_embeddings - 1)
            rows = expand_packed(self.layout, known, panels, self.dtype)
            rows.masked_fill_((known != flat).unsqueeze(1), math.nan)
        if self.scale != 1.0:
            # A factor on the host needs no copy to the device.
            rows *= torch.tensor(self.scale, dtype=self.dtype)
        return rows.reshape(*token_ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, layout={self.layout.name}"


def _are_equal(order: Tensor | None, other: Tensor | None) -> bool:
    return order is other or (order is not None and other is not None and torch.equal(order, other))


def packable_weights(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Maps the names of the weights that `replace_packed` can replace to their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for path, module in root.named_modules():
        is_scaled = isinstance(module, nn.Embedding) and hasattr(module, _SCALE)
        if is_scaled or type(module) in (nn.Linear, nn.Embedding):
            found[f"{path}.weight"] = tuple(cast(nn.Linear, module).weight.shape)
        elif are_usual(module) or have_neighbours(module):
            shapes = {f"{path}.{name}": tuple(getattr(module, name).shape) for name in EXPERT_WEIGHTS}
            # Each expert's gate, and what is multiplied by it, has panels of its own.
            if not any(_of_outputs(module, shape)[1] % (2 * LANES) for shape in shapes.values()):
                found |= shapes
    return found


def refuse_device(quantization: str, device: torch.device) -> None:
    """Refuses a device that cannot multiply by packed weights.

    Raises:
        SettingsError: the device has no kernels.
    """
    if device.type == "cpu":
        return  # `kernel_of` says what this CPU lacks
    if (reason := missing() if device.type == "cuda" else "it has no kernels") is not None:
        raise SettingsError(
            f"COROLLA_QUANTIZATION={quantization!r} does not work on {device.type}: {reason}. Set it to none."
        )


def replace_packed(root: nn.Module, layouts: Mapping[str, Layout], dtype: torch.dtype, device: torch.device) -> None:
    """Replaces what has packed weights by packed modules without weights; for a CPU it compiles their kernels.

    Args:
        root: the model, on any device, including the meta device.
        layouts: maps names of weights in `root` to their layouts; `packable_weights` must have them.
        dtype: the dtype of hidden states.
        device: where the model will be computed.

    Raises:
        CheckpointError: the number of a layer's columns is not a multiple of the columns of a block in its layout.
        StartupError: this machine cannot multiply by packed weights.
    """
    for layout in set(layouts.values()) if device.type == "cpu" else ():
        kernel_of(layout, dtype)
    for name, layout in layouts.items():
        path = name.removesuffix(".weight")
        parent_path, _, child_name = path.rpartition(".")
        parent: Any = root.get_submodule(parent_path)
        child = getattr(parent, child_name)
        packed: PackedLinear | PackedEmbedding | PackedExpertWeights
        if isinstance(child, nn.Parameter):
            if not isinstance(parent, PackedExperts):
                parent = PackedExperts(parent)
                root.set_submodule(parent_path, parent)
            delattr(parent, child_name)
            packed = PackedExpertWeights(_of_outputs(parent, tuple(child.shape)), layout)
        elif isinstance(child, nn.Embedding):
            scale = getattr(child, _SCALE, 1.0)
            packed = PackedEmbedding(child.num_embeddings, child.embedding_dim, layout, dtype, scale)
        else:
            plain = cast(nn.Linear, child)
            bias = cast(nn.Parameter | None, plain.bias)
            packed = PackedLinear(plain.in_features, plain.out_features, layout, bias)
        # The kernel reads whole blocks without a check.
        if packed.shape[-1] % layout.block_weights:
            raise CheckpointError(
                f"The file has {path!r} as {layout.name}, whose blocks have {layout.block_weights} columns, and "
                f"its model has {packed.shape[-1]} there; convert the model again."
            )
        setattr(parent, child_name, packed)


def fill_packed(
    root: nn.Module,
    names: Mapping[str, str],
    read: Callable[[str, tuple[int, ...], torch.device | None], Panels],
    device: torch.device | None = None,
) -> None:
    """Reads the weights of packed modules; those with the same stored weight share its memory.

    Args:
        names: maps the names of packed weights in `root` to names in the files.
        read: returns the panels for a name in the files, on the device; the weight must have the given shape.
        device: where the panels shall be; None: on the CPU.
    """
    held: dict[str, Panels] = {}
    for name, stored in names.items():
        module: Any = root.get_submodule(name.removesuffix(".weight"))
        if stored not in held:
            held[stored] = read(stored, module.shape, device)
        module.panels = held[stored].panels
        if held[stored].order is not None:
            module.order = held[stored].order


def make_up_packed(root: nn.Module) -> None:
    """Fills all packed linear layers and experts with arbitrary weights."""
    for module in root.modules():
        if isinstance(module, PackedLinear | PackedExpertWeights):
            panels = empty_panels(math.prod(module.shape[:-1]), module.shape[-1], module.layout).fill_(_MADE_UP_BYTE)
            if module.layout.divides:
                panels[:, :, : module.layout.minima_at].view(torch.float32).fill_(1.0)
            module.panels = panels


SILU: Final = ("SiLU", "SiLUActivation")
"""The classes of the activation of most gates, for which there are compiled functions."""
EXPERT_WEIGHTS: Final = ("gate_up_proj", "down_proj")
"""The names of experts' weights, `[experts, out, in]`, within their module."""
# The activation of usual gates, and the numbers of gpt-oss' gate.
_OF_GATES: Final = ("act_fn", "alpha", "limit")
# The module of transformers that gives experts their usual gate.
_LIBRARY: Final = "transformers.integrations.moe"


def are_usual(experts: Any) -> bool:
    """Returns True if experts have gate and up in one tensor, `[experts, out, in]`, and nothing else."""
    # A family with another gate brings a function of its own.
    gate = getattr(type(experts), "_apply_gate", None)
    return (
        getattr(gate, "__module__", None) == _LIBRARY
        and experts.has_gate
        and experts.is_concatenated
        and not (experts.is_transposed or experts.has_bias or experts.has_post_expert_norm)
    )


def have_neighbours(experts: Any) -> bool:
    """Returns True for the experts of gpt-oss: gate and up are neighbours, weights are `[experts, in, out]`."""
    return type(experts).__name__ == "GptOssExperts"


def _of_outputs(experts: Any, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape of experts' weights as `[experts, out, in]`."""
    num_experts, first, second = shape
    return (num_experts, second, first) if experts.is_transposed else (num_experts, first, second)


class PackedExpertWeights(nn.Module):
    """One weight of all experts of a layer. Products are computed as in `PackedLinear`.

    Args:
        shape: `[experts, out, in]`, where `out` is a multiple of 16.

    Attributes:
        shape: the shape of the weights.
        panels: uint8 `[panels, blocks, bytes of a block]`, see `repack`: those of one expert after those of another;
            None until they are read.
        expanded: `shape` in the rows' dtype, on a GPU whose kernels fail; then there are no panels. None otherwise.
    """

    panels: Tensor | None
    expanded: Tensor | None

    def __init__(self, shape: tuple[int, int, int], layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        self.layout = layout
        self.register_buffer("panels", None, persistent=False)
        self.register_buffer("expanded", None, persistent=False)
        self._views: PanelViews | None = None

    def panels_of(self, expert: int) -> Tensor:
        """The panels of one expert, uint8 `[panels of an expert, blocks, bytes of a block]`: a view of `panels`."""
        num_panels = self.shape[1] // LANES
        return cast(Tensor, self.panels).narrow(0, expert * num_panels, num_panels)

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The weights of one expert, expanded, `[out, in]` in `dtype`, on their device."""
        if self.expanded is not None:
            return self.expanded[expert]
        return unpack(self.panels_of(expert), self.layout, self.shape[1]).to(dtype)

    def forward(self, expert: int, rows: Tensor) -> Tensor:
        """Multiplies `rows`, `[R, in]` on the device of the weights, by an expert's weights; returns `[R, out]`."""
        if self.expanded is not None:
            return functional.linear(rows, self.expanded[expert])
        panels, num_outputs = self.panels_of(expert), self.shape[1]
        if panels.device.type == "cpu":
            return multiplied(self.layout, rows, panels, num_outputs, None, None)
        from corolla.kernels.triton.packed_launches import multiply_packed

        return multiply_packed(self.layout, rows, panels, num_outputs)

    def multiply(self, rows: Tensor, chosen: "ChosenExperts", bias: Tensor | None = None) -> Tensor:
        """Multiplies the rows of pairs by Triton kernels; see `expert_launches.multiply_experts`.

        Args:
            rows: `[N, in]` or `[pairs, in]`, on the device of the weights.
            chosen: the pairs.
            bias: `[experts, out]` in the same dtype; None: there is none.

        Returns:
            `[pairs, out]` in the same dtype.
        """
        from corolla.kernels.triton.expert_launches import multiply_experts, multiply_packed_experts
        from corolla.kernels.triton.packed_launches import PanelViews

        if self.expanded is not None:
            return multiply_experts(rows, self.expanded, chosen, bias)
        panels = cast(Tensor, self.panels)
        if self._views is None or self._views.panels is not panels:
            self._views = PanelViews.from_panels(panels, self.layout)
        return multiply_packed_experts(self.layout, rows, self._views, self.shape[1], chosen, bias)

    def expand(self, dtype: torch.dtype) -> None:
        """Replaces the panels by expanded weights in the rows' dtype, on their device."""
        expanded = torch.empty(self.shape, dtype=dtype, device=cast(Tensor, self.panels).device)
        for expert, matrix in enumerate(expanded):
            matrix.copy_(self.matrix(expert, dtype))
        self.expanded, self.panels, self._views = expanded, None, None

    def extra_repr(self) -> str:
        return f"{self.shape}, layout={self.layout.name}"


class PackedExperts(nn.Module):
    """Computes the same as experts of transformers; some of the weights stay packed.

    Args:
        experts: the experts; `are_usual` or `have_neighbours` is true for them.

    Attributes:
        gate_up_proj: a parameter of the experts' own shape, or packed weights, `[experts, 2 G, H]`.
        gate_up_proj_bias: `[experts, 2 G]`; None: there is none.
        down_proj: a parameter of the experts' own shape, or packed weights, `[experts, H, G]`.
        down_proj_bias: `[experts, H]`; None: there is none.
        is_transposed: whether parameters have inputs before outputs.
    """

    gate_up_proj: nn.Parameter | PackedExpertWeights
    down_proj: nn.Parameter | PackedExpertWeights

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.is_transposed: bool = experts.is_transposed
        for name in EXPERT_WEIGHTS:
            setattr(self, name, getattr(experts, name))
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias", None))
        # The family's gate finds here what it reads.
        self._gate = type(experts)._apply_gate
        for name in _OF_GATES:
            if hasattr(experts, name):
                setattr(self, name, getattr(experts, name))

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Runs the chosen experts of each token, by a compiled function or one expert after the other.

        On a CPU no token changes another's bits where all weights lie in panels.

        Args:
            hidden: `[N, H]`, on the device of the weights.
            ids: int64 `[N, chosen]`, the experts of each token.
            weights: `[N, chosen]`, the factors of their results.

        Returns:
            `[N, H]` in the dtype of `hidden`.
        """
        if (panels := self.compiled_panels(hidden.dtype)) is not None:
            return run_experts(hidden, ids, weights, *panels)
        num_tokens, num_chosen = ids.shape
        pairs = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.gate_up_proj.shape[0]).tolist()
        results = hidden.new_empty(len(pairs), hidden.shape[-1])
        for expert, own in enumerate(torch.split(pairs, counts)):
            if len(own):
                gated = self._gated(self._product("gate_up_proj", expert, hidden[own // num_chosen]))
                results[own] = self._product("down_proj", expert, gated)
        weighed = results.view(num_tokens, num_chosen, -1) * weights.unsqueeze(-1)
        # torch's own sum adds in an order that depends on where the numbers lie.
        mixed = weighed[:, 0].float()
        for number in range(1, num_chosen):
            mixed = mixed + weighed[:, number]
        return mixed.to(hidden.dtype)

    @property
    def lie_in_panels(self) -> bool:
        """Both weights lie in panels."""
        return all(isinstance(each, PackedExpertWeights) for each in (self.gate_up_proj, self.down_proj))

    def compiled_panels(self, dtype: torch.dtype) -> tuple[ExpertPanels, ExpertPanels] | None:
        """The panels of both weights, if a compiled function runs these experts for hidden states of a dtype.

        Then no token depends on the others.
        """
        gate_up, down = self.gate_up_proj, self.down_proj
        if not isinstance(gate_up, PackedExpertWeights) or not isinstance(down, PackedExpertWeights):
            return None
        has_usual_gate = type(getattr(self, "act_fn", None)).__name__ in SILU and self.gate_up_proj_bias is None
        if not has_usual_gate or not can_run(dtype, gate_up.shape[2], down.shape[2]):
            return None
        if gate_up.panels is None or down.panels is None or gate_up.panels.device.type != "cpu":
            return None
        return (
            ExpertPanels(gate_up.layout, gate_up.panels, gate_up.shape[1]),
            ExpertPanels(down.layout, down.panels, down.shape[1]),
        )

    def _gated(self, product: Tensor) -> Tensor:
        if product.device.type != "cpu":
            return cast(Tensor, self._gate(self, product))
        parts = in_whole_vectors(product, product.shape[1] // 2)
        return torch.cat([self._gate(self, part) for part in parts])[: len(product)]

    def _product(self, name: str, expert: int, rows: Tensor) -> Tensor:
        weights, bias = getattr(self, name), getattr(self, f"{name}_bias")
        if isinstance(weights, PackedExpertWeights):
            product = cast(Tensor, weights(expert, rows))
            return product if bias is None else product.add_(bias[expert])
        weight = weights[expert].T if self.is_transposed else weights[expert]
        return functional.linear(rows, weight, None if bias is None else bias[expert])


@torch.no_grad()
def lay_out_experts(root: nn.Module, asked_for: str = AUTO) -> None:
    """Lays the weights of usual experts below `root` out as panels, where the rule for products has panels for them.

    Then a product with several rows reads an expert's weights once, and no row depends on the others. Weights are on
    the CPU.

    Args:
        asked_for: see `way_of`.
    """
    for path, experts in list(root.named_modules()):
        if not are_usual(experts):
            continue
        packed = PackedExperts(experts)
        weights = [cast(nn.Parameter, getattr(packed, name)) for name in EXPERT_WEIGHTS]
        if not all(_takes_panels(each, asked_for) for each in weights):
            continue
        root.set_submodule(path, packed)
        for name, each in zip(EXPERT_WEIGHTS, weights, strict=True):
            layout = cast(PlainLayout, plain_layout(each.dtype))
            # A CPU multiplies by panels of both kinds of layouts in the same way.
            laid_out = PackedExpertWeights(cast(tuple[int, int, int], tuple(each.shape)), cast(Layout, layout))
            laid_out.panels = lay_out(each.flatten(0, 1), layout, leave=_discard)
            delattr(packed, name)
            delattr(experts, name)
            setattr(packed, name, laid_out)


def _discard(part: Tensor) -> None:
    heap.discard(part.data_ptr(), part.nbytes)


def _takes_panels(weight: nn.Parameter, asked_for: str) -> bool:
    shape = (weight.shape[1], weight.shape[2])
    way = way_of(
        this_processor(), str(weight.dtype).removeprefix("torch."), shape, weight[0].nbytes, asked_for=asked_for
    )
    return way is Way.PANELS and weight.device.type == "cpu" and shape[0] % LANES == 0
