"""What `from_pretrained` and copies of models take over from transformers, and where they differ."""

import copy
from collections.abc import Mapping
from typing import Any, Final, NoReturn, Self

import torch

# They choose how transformers loads or computes weights; here there is one way, or the block servers decide.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "attn_implementation", "experts_implementation", "ignore_mismatched_sizes", "low_cpu_mem_usage", "max_memory",
        "offload_buffers", "offload_folder", "offload_state_dict", "tp_plan", "use_safetensors", "weights_only",
    }
)  # fmt: skip
_REASONS: Final[Mapping[str, str]] = {
    "trust_remote_code": "code of a checkpoint is never run",
    "quantization_config": "the block servers quantise; name what they run by `quantization=`",
    "load_in_8bit": "the block servers quantise; name what they run by `quantization=`",
    "load_in_4bit": "the block servers quantise; name what they run by `quantization=`",
    "config": "the configuration is the checkpoint's, as on the block servers",
    "state_dict": "the weights are the checkpoint's, as on the block servers",
    "gguf_file": "give the GGUF file's own path as the checkpoint",
    "cache_dir": "set HF_HUB_CACHE",
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "token": "set HF_TOKEN",
    "use_auth_token": "set HF_TOKEN",
}


class NotPickled:
    """Base class of objects that can be copied within their process and not be pickled, since they hold connections."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a model whose blocks are remote cannot be pickled, since it holds connections; call `from_pretrained` in "
            "the process that uses it"
        )

    def __copy__(self) -> Self:
        return self._with(self.__dict__.copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = self._with({})
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _with(self, attributes: dict[str, Any]) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(attributes)
        return twin


def read_options(options: dict[str, Any], dtype: Any, device: Any) -> tuple[Any, torch.device | str]:
    """The dtype and the device that a caller wants, from names of this library or of transformers.

    Args:
        options: the further options, such as `torch_dtype` and `device_map`.
        dtype: the caller's `dtype`; None: not given.
        device: the caller's `device`; None: not given.

    Raises:
        ValueError: an option is not supported; the message has its name and the reason.
    """
    options = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
    torch_dtype, device_map = options.pop("torch_dtype", None), options.pop("device_map", None)
    for name, value in options.items():
        reason = _REASONS.get(name)
        if reason is None:
            raise ValueError(f"`{name}` is no option of `from_pretrained` here.")
        if value is not None and value is not False:
            raise ValueError(f"`{name}` is not supported over remote blocks: {reason}.")
    dtype = torch_dtype if dtype is None else dtype
    if isinstance(dtype, str) and dtype == "auto":
        raise ValueError("`dtype` must be what the block servers run, such as `bfloat16`; they decide, not the file.")
    return torch.float32 if dtype is None else dtype, _device_of(device_map) if device is None else device


def _device_of(device_map: Any) -> torch.device | str:
    """The device of the edges, which are all that is placed here."""
    if isinstance(device_map, Mapping):
        places = {str(place) for place in device_map.values()}
        if len(places) != 1:
            raise ValueError("`device_map` must name one device: embedding, norm and head stay together.")
        (device_map,) = device_map.values()
    if device_map is None:
        return "cpu"
    if isinstance(device_map, str) and device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError):
        raise ValueError(f"`device_map` must be a device or `auto`, not {device_map!r}.") from None
