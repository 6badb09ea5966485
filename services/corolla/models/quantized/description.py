"""Reads and checks a checkpoint's `quantization_config`. Pure.

The stored tensors show which weights are packed, and in which of the configuration's schemes: a module that was not
quantised has an ordinary weight. So the patterns `ignore`, `targets` and `modules_to_not_convert`, regular expressions
from an untrusted file, are never run.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from corolla.chassis.errors import CheckpointError

QUANTIZATION_KEYS: Final = ("quantization_config", "compression_config")
"""The keys of `config.json` for the quantisation; the second is an older name."""

DESCRIPTION_FILES: Final = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of ModelOpt, AutoGPTQ and AutoAWQ that describe a quantisation if `config.json` does not."""

_MAX_SCHEMES: Final = 256
_LARGEST: Final = 1 << 20
_PLAIN_BITS: Final = 16
_GPTQ_BITS: Final = frozenset({2, 3, 4, 8})
_AWQ_LAYOUTS: Final = ("gemm",)
# Maps the layout to the number that was subtracted from stored zero points: 1 by AutoGPTQ, 0 in v2 of its format.
_GPTQ_LAYOUTS: Final = {"gptq": 1, "gptq_v2": 0}
# AutoRound packs as AutoAWQ, as AutoGPTQ, or as version 2 of the latter's format, whatever kernel it names last.
_AUTO_ROUND_LAYOUTS: Final = {
    "auto_round": "gptq_v2", "auto_round:exllamav2": "gptq_v2", "auto_round:gptqmodel": "gptq_v2",
    "auto_round:tritonv2": "gptq_v2", "auto_round:auto_gptq": "gptq", "auto_round:auto_gptq:exllamav2": "gptq",
    "auto_round:gptq": "gptq", "auto_round:gptq:exllamav2": "gptq", "auto_round:auto_awq": "gemm",
    "auto_round:awq": "gemm",
}  # fmt: skip
_COMPRESSED_FORMATS: Final = (
    "dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized", "mxfp8-quantized",
    "naive-quantized", "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip
# A float of eight bits, and a scale for the whole weight or for each output; or NVFP4, in some models next to FP8.
_MODELOPT_ALGORITHMS: Final[Mapping[str, str]] = {
    "FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4",
    "MIXED_PRECISION": "nvfp4",
}  # fmt: skip
# These keys tell which library wrote a description without `quant_method`. AutoGPTQ's first files have none.
_TELLING_KEYS: Final = {
    "bitsandbytes": ("load_in_4bit", "load_in_8bit"),
    "compressed-tensors": ("config_groups",),
    "modelopt": ("quant_algo", "quantization"),
    "awq": ("w_bit", "q_group_size"),
    "gptq": ("bits",),
}
_WHAT_TO_DO: Final = "give the original checkpoint, or one in another format of docs/models.md"


@dataclass(frozen=True, slots=True)
class Scheme:
    """The settings with which some weights were quantised.

    Attributes:
        bits: the bits of a number.
        group_size: how many inputs share a scale; 0: all inputs do, or scales belong to blocks.
        block: the numbers of outputs and inputs that share a scale; None: scales do not belong to blocks.
    """

    bits: int
    group_size: int = 0
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """The format and settings of a checkpoint's packed weights.

    Attributes:
        method: the name of the format, a key of FORMATS in `tensors`.
        schemes: all schemes of the weights; empty where the stored tensors show the scheme.
        zero_offset: the number to add to stored zero points.
        is_symmetric: whether all zero points are the middle of the numbers.
    """

    method: str
    schemes: tuple[Scheme, ...] = ()
    zero_offset: int = 0
    is_symmetric: bool = field(default=False, repr=False)


def quantization_of(
    configuration: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]] | None = None
) -> Quantization | None:
    """Reads the quantisation from a checkpoint's files; None: the weights are not packed.

    Args:
        configuration: the content of `config.json`.
        others: the contents of those `DESCRIPTION_FILES` that the checkpoint has; they count if `config.json` says
            nothing.

    Raises:
        CheckpointError: this quantisation is not served, or its description is not valid.
    """
    place = "config.json has a quantization_config"
    stored = next((configuration[key] for key in QUANTIZATION_KEYS if configuration.get(key) is not None), None)
    if stored is None and others:
        name = next(each for each in DESCRIPTION_FILES if each in others)
        place, stored = f"the checkpoint has a {name}", others[name]
    is_described = isinstance(stored, Mapping) and stored.get("quant_method") is not None
    if isinstance(configuration.get("quantization"), Mapping) and not is_described:
        raise CheckpointError(f"Weights in the format of MLX are not served; {_WHAT_TO_DO}.")
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        raise CheckpointError("config.json has a quantization_config that is not a table; correct or remove it.")
    method = stored.get("quant_method")
    if method is None:
        method = next((named for named, keys in _TELLING_KEYS.items() if any(stored.get(key) for key in keys)), None)
    if method is None:
        raise CheckpointError(
            f"{place} without a quant_method, so nothing says how weights are packed; remove it if they are not, or "
            f"{_WHAT_TO_DO}: {', '.join(sorted(METHODS))}."
        )
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        name = str(method)[:40]
        raise CheckpointError(
            f"Weights quantised by {name!r} are not served; {_WHAT_TO_DO}: {', '.join(sorted(METHODS))}."
        )
    if configuration.get("model_type") == "gpt2":
        raise CheckpointError(
            f"The layers of gpt2 keep their weights transposed, which is not served from {method}; {_WHAT_TO_DO}."
        )
    return read(stored)


def _modelopt(stored: Mapping[str, Any]) -> Quantization | None:
    """ModelOpt's own file has the settings one level deeper than `config.json`."""
    inner = stored.get("quantization", stored)
    algorithm = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(algorithm, str | None):
        raise _senseless("quantization")
    if algorithm is None:
        return None  # only keys and values are quantised, which is not done here
    _one_of(algorithm, _MODELOPT_ALGORITHMS, "ModelOpt's weights of the type")
    return Quantization(_MODELOPT_ALGORITHMS[algorithm], (Scheme(8),))


def _awq(stored: Mapping[str, Any]) -> Quantization:
    layout = str(stored.get("version", stored.get("format", stored.get("checkpoint_format", "gemm")))).lower()
    _one_of(layout, _AWQ_LAYOUTS, "AWQ weights in the layout")
    bits = _number(stored, "bits", "w_bit", default=4)
    if bits != 4:
        raise CheckpointError(f"AWQ weights of {bits} bits are not served; {_WHAT_TO_DO}.")
    return Quantization("awq", (Scheme(bits, _group_size(stored, "group_size", "q_group_size", default=128)),))


def _gptq(stored: Mapping[str, Any]) -> Quantization:
    layout = str(stored.get("checkpoint_format", stored.get("format", "gptq"))).lower()
    _one_of("marlin" if stored.get("is_marlin_format") else layout, _GPTQ_LAYOUTS, "GPTQ weights in the layout")
    if stored.get("pack_dtype", "int32") != "int32":
        raise CheckpointError(f"GPTQ weights that are not packed in int32 are not served; {_WHAT_TO_DO}.")
    whole = _gptq_scheme(stored, {})
    # GPTQModel's exceptions map a pattern of modules to the settings that differ for these.
    exceptions = stored.get("dynamic") or {}
    if not isinstance(exceptions, Mapping) or len(exceptions) > _MAX_SCHEMES:
        raise _senseless("dynamic")
    others = [_gptq_scheme(each, stored) for each in exceptions.values() if isinstance(each, Mapping)]
    schemes = tuple(dict.fromkeys([whole, *others]))
    return Quantization("gptq", schemes, _GPTQ_LAYOUTS[layout], stored.get("sym") is True)


def _auto_round(stored: Mapping[str, Any]) -> Quantization:
    packing = stored.get("packing_format", "auto_round:auto_gptq")
    _one_of(str(packing), _AUTO_ROUND_LAYOUTS, "AutoRound's weights in the layout")
    _one_of(str(stored.get("data_type", "int")), ("int",), "AutoRound's weights of the type")
    # Exceptions map a module, or a pattern of modules, to the settings that differ; those of 16 bits are not packed.
    exceptions = stored.get("extra_config") or {}
    if not isinstance(exceptions, Mapping) or not all(isinstance(each, Mapping) for each in exceptions.values()):
        raise _senseless("extra_config")
    others = [{key: value for key, value in each.items() if value is not None} for each in exceptions.values()]
    packed = [each for each in others if _number({**stored, **each}, "bits", default=4) < _PLAIN_BITS]
    schemes = tuple(dict.fromkeys(_gptq_scheme(each, stored) for each in ({}, *packed)))
    layout = _AUTO_ROUND_LAYOUTS[str(packing)]
    if len(schemes) > _MAX_SCHEMES:
        raise _senseless("extra_config")
    if layout in _GPTQ_LAYOUTS:
        return Quantization("gptq", schemes, _GPTQ_LAYOUTS[layout], stored.get("sym") is True)
    if len(schemes) > 1:
        raise CheckpointError(f"AutoRound's AWQ weights of several bits or group sizes are not served; {_WHAT_TO_DO}.")
    return _awq({**stored, "version": layout})


def _gptq_scheme(stored: Mapping[str, Any], otherwise: Mapping[str, Any]) -> Scheme:
    merged = {**otherwise, **stored}
    bits = _number(merged, "bits", default=4)
    if bits not in _GPTQ_BITS:
        raise CheckpointError(f"GPTQ weights of {bits} bits are not served; {_WHAT_TO_DO}.")
    return Scheme(bits, _group_size(merged, "group_size", default=128))


def _compressed_tensors(stored: Mapping[str, Any]) -> Quantization:
    if stored.get("sparsity_config"):
        raise CheckpointError(f"Sparse weights of compressed-tensors are not served; {_WHAT_TO_DO}.")
    if (stored.get("transform_config") or {}) != {}:
        raise CheckpointError(
            f"Weights of compressed-tensors that were rotated (transform_config) are not served; {_WHAT_TO_DO}."
        )
    groups = stored.get("config_groups") or {}
    if not isinstance(groups, Mapping) or len(groups) > _MAX_SCHEMES:
        raise _senseless("config_groups")
    schemes = []
    for group in groups.values():
        if not isinstance(group, Mapping):
            raise _senseless("config_groups")
        layout = group.get("format") or stored.get("format") or "dense"
        _one_of(str(layout), _COMPRESSED_FORMATS, "compressed-tensors' weights in the format")
        if isinstance(weights := group.get("weights"), Mapping):
            schemes.append(
                Scheme(
                    _number(weights, "num_bits", default=8),
                    _group_size(weights, "group_size", default=-1),
                    _block(weights, "block_structure") if weights.get("strategy") == "block" else None,
                )
            )
    return Quantization("compressed-tensors", tuple(dict.fromkeys(schemes)))


METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], Quantization | None]]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "bitsandbytes": lambda _: Quantization("bitsandbytes"),
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": lambda _: Quantization("fp8", (Scheme(8),)),
    "fp8": lambda stored: Quantization("fp8", (Scheme(8, block=_block(stored, "weight_block_size")),)),
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": lambda _: Quantization("mxfp4"),
}
"""Maps a value of `quant_method` to the function that reads such a `quantization_config`."""


def _one_of(given: str, known: Container[str], what: str) -> None:
    if given not in known:
        raise CheckpointError(f"{what} {given[:40]!r} are not served; {_WHAT_TO_DO}.")


def _number(stored: Mapping[str, Any], *names: str, default: int) -> int:
    """The value of the first of `names` that is set. Raises CheckpointError if it is not an integer within limits."""
    value = next((stored[name] for name in names if stored.get(name) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _LARGEST:
        raise _senseless(names[0])
    return value


def _group_size(stored: Mapping[str, Any], *names: str, default: int) -> int:
    value = _number(stored, *names, default=default)
    if value == 0:
        raise _senseless(names[0])
    return max(0, value)


def _block(stored: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    sides = stored.get(name)
    if sides is None:
        return None
    if isinstance(sides, str):
        sides = [int(side) if side.isdecimal() else side for side in sides[:20].split("x")]
    if not isinstance(sides, Sequence) or len(sides) != 2:
        raise _senseless(name)
    if not all(isinstance(side, int) and 0 < side <= _LARGEST for side in sides):
        raise _senseless(name)
    return sides[0], sides[1]


def _senseless(name: str) -> CheckpointError:
    return CheckpointError(
        f"config.json has a {name} that makes no sense; correct it, or give the original checkpoint."
    )
