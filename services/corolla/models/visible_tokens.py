"""Finds which earlier tokens each layer of a model sees: the family's own code makes its masks, and they are asked."""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, DynamicCache, PretrainedConfig, PreTrainedModel

from corolla.chassis.errors import UnsupportedFamily
from corolla.models.checkpoint import context_length_of
from corolla.models.families import Family, code_failed

# Under this name of an attention implementation, transformers asks `_describe` for masks.
_ASKED: Final = "corolla_asked"
# Tokens of the call in which a family makes its masks.
_NUM_TOKENS: Final = 4

_Sees = Callable[[Tensor, Tensor], Tensor]
"""Says of queries and keys, int64 positions that broadcast, whether the query sees the key."""

_MADE: Final = ContextVar[list[_Sees]]("the masks that the present call has made")


def attention_windows(base: PreTrainedModel, family: Family) -> tuple[int | None, ...]:
    """The attention window of each layer: how many tokens a token sees, itself included; None: all earlier tokens.

    Where a token sees the earlier ones of its chunk only, the window is the chunk's length: no token sees more, and
    the family's own masks hide the chunks before.

    The base model's forward runs with layers that compute nothing, and each layer's window is that of the mask which
    it got. Fields of the configuration are not read, since what they mean depends on the family.

    Args:
        base: the family's base model, whole or cut, on any device; cut, if it is on the meta device. It is left as it
            was.

    Raises:
        UnsupportedFamily: a token sees later tokens, or the earlier ones in a manner that is not served; or the cache
            of transformers drops tokens that the layers see.
    """
    layers, model_type = cast(nn.ModuleList, base.get_submodule(family.layers)), str(base.config.model_type)
    _refuse_acausal(layers, model_type)
    length = max(context_length_of(base.config), _NUM_TOKENS)
    made, given = _masks_of(base, family, layers)
    # Where no layer gets a mask as it was made, layers get what the family makes of it.
    known = {sees for sees in given if sees is not None} or set(made)
    found = {sees: _window(sees, length, model_type, may_have_chunks=not family.packs_rows) for sees in known}
    windows = tuple(None if sees is None else found[sees] for sees in given)
    _refuse_short_caches(base.config, family, windows, length)
    return windows


def _describe(*, batch_size: int, q_length: int, kv_length: int, mask_function: Any, device: Any, **_: Any) -> Tensor:
    """A mask that knows the function which would fill it; transformers calls this to make a mask."""

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        return cast(Tensor, mask_function(0, 0, queries, keys))

    _MADE.get().append(sees)
    mask: Any = torch.zeros(batch_size, 1, q_length, kv_length, device=device)
    mask.sees = sees
    return cast(Tensor, mask)


AttentionMaskInterface.register(_ASKED, _describe)


@torch.inference_mode()
def _masks_of(base: PreTrainedModel, family: Family, layers: nn.ModuleList) -> tuple[list[_Sees], list[_Sees | None]]:
    """The masks that the base model's forward makes, and the one that each layer gets; None: it gets no such mask."""
    config, given = base.config, cast(list[_Sees | None], [None] * len(layers))
    # Some masks read numbers, which the meta device has not. A cut model has no weights outside of its layers.
    device = torch.device("cpu") if base.device.type == "meta" else base.device
    hidden = torch.zeros(1, _NUM_TOKENS, int(config.hidden_size), dtype=base.dtype, device=device)
    positions = torch.arange(_NUM_TOKENS, device=device)[None]
    implementation = config._attn_implementation
    # Nothing here needs angles, and some rotary embeddings look at numbers, which the meta device has not.
    rotary = [each for each in base.modules() if type(each).__name__.endswith("RotaryEmbedding")]
    # The layers of some families return their output alone, and other layers return it in a tuple.
    for returns_tuple in (False, True):
        for index, layer in enumerate(layers):
            layer.forward = _recording(given, index, returns_tuple)
        for each in rotary:
            each.forward = lambda hidden, *_arguments, **_options: (hidden, hidden)
        made: list[_Sees] = []
        token = _MADE.set(made)
        config._attn_implementation = _ASKED
        try:
            cast(Any, base)(
                inputs_embeds=hidden,
                position_ids=positions,
                use_cache=True,
                **{family.past.cache_argument: _EmptyCache(config=config)},
            )
            return made, given
        except Exception as error:
            if returns_tuple:
                raise UnsupportedFamily(code_failed(config, "fails with this config.json", error)) from error
        finally:
            _MADE.reset(token)
            config._attn_implementation = implementation
            for each in (*layers, *rotary):
                del each.forward
    raise AssertionError("the second try returns or raises")


def _recording(masks: list[_Sees | None], index: int, returns_tuple: bool) -> Callable[..., Any]:
    def forward(hidden: Tensor, *arguments: Any, **options: Any) -> Any:
        given = (*arguments, *options.values())
        masks[index] = next((each.sees for each in given if hasattr(each, "sees")), None)
        return (hidden, None) if returns_tuple else hidden

    return forward


def _window(sees: _Sees, length: int, model_type: str, *, may_have_chunks: bool) -> int | None:
    """The window of a mask, or the length of its chunks, for texts of at most `length` tokens."""
    last = length - 1
    first = _first_seen(sees, last)
    window = last - first + 1 if first else None
    # A window moves on with each token, a chunk begins anew.
    has_chunks = may_have_chunks and first > 0 and not _is_seen(sees, first, first - 1)
    if has_chunks:
        window = first - _first_seen(sees, first - 1)
    # Around each place where a mask could change: the text's begin and end, the token itself, the window's begin.
    width = length if window is None else window
    queries = torch.tensor(sorted(_near(0, width, 2 * width, last // 2, last, below=length)))[:, None]
    keys = torch.cat([queries + step for step in (-width - 1, -width, -width + 1, -1, 0, 1, 2)], dim=1)
    keys = torch.cat([keys, queries // 2, torch.zeros_like(queries), torch.full_like(queries, last)], dim=1).clamp(0)
    seen = sees(queries, keys).expand(keys.shape)
    if bool((seen & (keys > queries)).any()):
        raise _acausal(model_type)
    oldest = queries - queries % width if has_chunks else queries - width + 1
    expected = (keys <= queries) & (keys >= oldest)
    if not torch.equal(seen, expected):
        raise UnsupportedFamily(
            f"A token of this {model_type} model sees some earlier tokens that are neither all of them nor the newest "
            "ones, which is not served; choose another checkpoint."
        )
    return window


def _near(*positions: int, below: int) -> set[int]:
    return {each + step for each in positions for step in (-1, 0, 1) if 0 <= each + step < below}


def _is_seen(sees: _Sees, query: int, key: int) -> bool:
    return bool(sees(torch.tensor(query), torch.tensor(key)))


def _first_seen(sees: _Sees, query: int) -> int:
    """The first key that a query sees, if it sees all keys from there to itself."""
    if _is_seen(sees, query, 0):
        return 0
    unseen, seen = 0, query
    while seen - unseen > 1:
        middle = (unseen + seen) // 2
        unseen, seen = (unseen, middle) if _is_seen(sees, query, middle) else (middle, seen)
    return seen


def _refuse_acausal(layers: nn.ModuleList, model_type: str) -> None:
    """Refuses attention that is not causal where it gets no mask."""
    if any(getattr(module, "is_causal", True) is False for module in layers.modules()):
        raise _acausal(model_type)


def _acausal(model_type: str) -> UnsupportedFamily:
    return UnsupportedFamily(
        f"By its config.json, a token of this {model_type} model sees later tokens, so the model does not make text "
        "token by token; choose a causal checkpoint, or, if it is one, remove is_causal or use_bidirectional_attention."
    )


def _refuse_short_caches(
    config: PretrainedConfig, family: Family, windows: tuple[int | None, ...], length: int
) -> None:
    """Refuses a configuration by which transformers' cache keeps less than the layers see.

    Then the answers of transformers depend on how a text was cut into calls, so there is no truth to equal.
    """
    of_layers = (window for window in windows for _ in range(family.past.attentions))
    for layer, (cached, window) in enumerate(zip(_layers_of_cache(config), of_layers, strict=True)):
        if cached.is_linear and not family.past.keeps_states:
            raise UnsupportedFamily(
                f"config.json gives layer {layer} a recurrent state (layer_types), with which a {config.model_type} "
                "model is not computed; correct model_type, or remove that field."
            )
        if cached.window is not None and cached.window < min(window or length, length):
            raise UnsupportedFamily(
                f"config.json lets layer {layer} keep {cached.window} tokens ({_names(config, cached.window)}), and "
                f"the layers of a {config.model_type} model see more of them; correct model_type, or remove that field."
            )


class _EmptyCache(DynamicCache):
    """A cache without tokens; that of transformers fails where a span has recurrent layers only."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class _CachedLayer(NamedTuple):
    window: int | None
    is_linear: bool


def _layers_of_cache(config: PretrainedConfig) -> Iterator[_CachedLayer]:
    for layer in DynamicCache(config=config).layers:
        window = getattr(layer, "sliding_window", None)
        yield _CachedLayer(window if getattr(layer, "is_sliding", False) else None, "Linear" in type(layer).__name__)


def _names(config: PretrainedConfig, window: int) -> str:
    found = sorted(name for name, value in config.to_dict().items() if type(value) is int and value == window)
    return ", ".join(found) or "layer_types"
