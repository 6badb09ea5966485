"""The multi-token prediction (MTP) block that comes with some models: it drafts the token after the next one.

DeepSeek-V3 has it (2024, 2.2), and GLM-4.5. A checkpoint stores it as the layer behind the model's last one: an
ordinary decoder layer, which `span_model.load_span` adds to the last span, and the parts that this module loads. For
the token at position `i` the layer takes a projection of that token's embedding and of the model's output, behind the
final norm, for the token before; from the layer's output the head chooses the token at position `i + 1`. Embedding
and head are the model's. `MtpModel` in transformers' `modeling_layers.py` computes the same.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from corolla.chassis.errors import CheckpointError, StartupError
from corolla.models.checkpoint import Checkpoint
from corolla.models.chunked_reads import ChunkedTensor
from corolla.models.cut_model import PER_LAYER_LISTS
from corolla.models.edges import Edges
from corolla.models.linear import choose_products, replace_linears
from corolla.models.product_rule import AUTO

MTP_RATES: Final[tuple[float, ...]] = (0.8,)
"""The expected share of right draft tokens before any was checked: DeepSeek-V3 states 0.85 to 0.9 for the first one."""

# Others order the inputs of the projection, or name the parts, in another way.
_FAMILIES: Final = frozenset(("deepseek_v3", "glm4_moe"))
_PARTS: Final = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
NOT_OF_LAYER: Final = ("enorm.", "hnorm.", "eh_proj.", "shared_head.", "embed_tokens.")
"""The beginnings of the names, behind the block's number, of tensors outside of the decoder layer."""


def mtp_tensors(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Maps the names of what `load_mtp_parts` reads to the stored ones; empty if the model comes without the block."""
    if checkpoint.gguf is not None or checkpoint.family.model_type not in _FAMILIES:
        return {}
    prefix = rf"(?:model\.)?{re.escape(checkpoint.family.layers)}\.{checkpoint.num_blocks}\."
    found: dict[str, str] = {}
    for part, name in _PARTS.items():
        # A packed weight is several tensors.
        own = re.compile(rf"{prefix}{re.escape(name)}\.(\w+)")
        matches = [(match[1], stored) for each, stored in checkpoint.names.items() if (match := own.fullmatch(each))]
        if not matches:
            return {}
        found |= {f"{part}.{ending}": stored for ending, stored in matches}
    return found


def check_has_mtp(checkpoint: Checkpoint) -> None:
    """Raises StartupError if the model comes without a multi-token prediction block that can draft."""
    if not mtp_tensors(checkpoint):
        raise StartupError(
            "COROLLA_DRAFT_MODEL=mtp needs the multi-token prediction block of a DeepSeek-V3 or GLM-4.5 checkpoint "
            f"as safetensors, and {checkpoint.name} has none; remove the setting, or name a draft model."
        )


def with_mtp_layer(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a model's configuration whose last layer is the decoder layer of the multi-token prediction block."""
    longer = copy.deepcopy(config)
    for name in PER_LAYER_LISTS:
        entries = None if name in longer.attribute_map else getattr(longer, name, None)
        if entries and not isinstance(getattr(type(longer), name, None), property):
            setattr(longer, name, [*entries, entries[-1]])
    longer.num_hidden_layers += 1
    return longer


def mtp_bytes(checkpoint: Checkpoint, dtype: torch.dtype, block_bytes: int) -> int:
    """Bytes that the block takes in addition to a span's: its layer, its projection and the embedding. Pure."""
    hidden_size = checkpoint.hidden_size
    return block_bytes + (2 * hidden_size + checkpoint.vocab_size) * hidden_size * dtype.itemsize


class _Parts(nn.Module):
    """What the block has around its decoder layer."""

    def __init__(self, norm: type[nn.Module], hidden_size: int, eps: float) -> None:
        super().__init__()
        made: Any = norm
        self.enorm = made(hidden_size, eps=eps)
        self.hnorm = made(hidden_size, eps=eps)
        self.eh_proj: nn.Module = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.norm = made(hidden_size, eps=eps)


@dataclass(frozen=True, eq=False)
class MtpParts:
    """What the block has around its decoder layer, and the ends of the model.

    All tensors are on the device of the weights, in the model's dtype.

    Attributes:
        edges: has the embedding.
        head: has final norm and head; it may be the same object.
    """

    edges: Edges
    head: Edges
    parts: _Parts

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that the ends of this server's span do not have."""
        own = sum(each.nbytes for each in self.parts.parameters())
        return own + (0 if self.edges is self.head else self.edges.nbytes)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head.device

    def normed(self, hidden: Tensor) -> Tensor:
        """The last block's output behind the model's final norm, `[T, H]`.

        Args:
            hidden: `[T, H]`, the last block's output.
        """
        return self.head.norm(hidden)

    @torch.inference_mode()
    def input(self, token_ids: Tensor, normed: Tensor) -> Tensor:
        """The input of the decoder layer, `[T, H]`.

        Args:
            token_ids: int64 `[T]`.
            normed: `[T, H]`, for the tokens before: the last block's output behind the final norm, or for draft tokens
                what `output` returns; zeros where it is not known.
        """
        embedded = self.edges.embed(token_ids, torch.zeros_like(token_ids))
        both = torch.cat((self.parts.enorm(embedded), self.parts.hnorm(normed)), dim=-1)
        return cast(Tensor, self.parts.eh_proj(both))

    @torch.inference_mode()
    def output(self, hidden: Tensor) -> Tensor:
        """The block's output, `[T, H]`, which the head takes, and the block itself for the next draft token.

        SGLang does the same (`deepseek_nextn.py`).

        Args:
            hidden: `[T, H]`, the output of the decoder layer.
        """
        return cast(Tensor, self.parts.norm(hidden))

    @torch.inference_mode()
    def logits(self, output: Tensor) -> Tensor:
        """The logits of the tokens that follow, float32 `[T, V]`, from the block's output `[T, H]`."""
        return cast(Tensor, self.head.output_embedding(output)).float()


def load_mtp_parts(
    checkpoint: Checkpoint,
    layer: nn.Module,
    edges: Edges,
    head: Edges,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    products: str = AUTO,
) -> MtpParts:
    """Reads what the block has around its decoder layer.

    Args:
        layer: the decoder layer, whose norms show their class.
        edges: has the embedding.
        head: has final norm and head.
        products: see `product_rule.way_of`.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration says, or cannot be read.
    """
    names = mtp_tensors(checkpoint)
    norm = next(type(module) for name, module in layer.named_modules() if "norm" in name)
    parts = _Parts(norm, checkpoint.hidden_size, float(checkpoint.config.rms_norm_eps)).to(dtype)
    with checkpoint.open_tensors(names, dtype) as tensors:
        for name, parameter in parts.named_parameters():
            if name not in tensors:
                raise CheckpointError(f"{checkpoint.name} lacks {name} of its multi-token prediction block.")
            # A packed weight tells its shape only once it is read.
            stored = ChunkedTensor(tensors[name], dtype)[:].to(dtype)
            if stored.numel() != parameter.numel() or stored.shape[-1] != parameter.shape[-1]:
                raise CheckpointError(
                    f"{checkpoint.name} has {name} of its multi-token prediction block in the shape "
                    f"{list(stored.shape)} where its config.json has "
                    f"{list(parameter.shape)}; correct config.json, or give a checkpoint that fits it."
                )
            parameter.data = stored
    parts = parts.eval().requires_grad_(False).to(torch.device(device))
    choose_products(replace_linears(parts), asked_for=products)
    return MtpParts(edges, head, parts)
