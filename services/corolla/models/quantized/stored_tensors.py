"""Finds and checks the parts of a packed weight: the stored tensors that together hold it. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol


class Stored(Protocol):
    """The interface of safetensors' slices: a tensor of a file that is read when it is indexed."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> Any: ...


StoredTensors = Mapping[str, Stored]
"""The parts of a weight by role, which follows from the part's name. An ordinary weight is one part, `weight`."""


class Unfit(ValueError):
    """The parts do not hold a weight, or not one of the needed kind; the message says what is wrong with them."""


def grouped(names: Iterable[str], endings: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Groups the names of stored tensors by weight.

    Args:
        names: the names of stored tensors.
        endings: maps the ending of a part's name to the ending that the weight's name has instead.

    Returns:
        For each weight's name, a map from its parts' roles to their names.
    """
    longest_first = sorted(endings, key=len, reverse=True)
    groups: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        ending = next((each for each in longest_first if name.endswith(each)), None)
        if ending is None:
            groups[name]["weight"] = name
        else:
            groups[name.removesuffix(ending) + endings[ending]][role_of(ending)] = name
    return dict(groups)


def role_of(ending: str) -> str:
    """The role of a part by its ending: `qzeros` for `.qzeros`, `absmax` for `.weight.absmax`."""
    return ending.removeprefix(".weight.").lstrip("._")


def need(stored: StoredTensors, *roles: str) -> None:
    """Raises Unfit where a part is missing."""
    if absent := [role for role in roles if role not in stored]:
        raise Unfit(f"has no {absent[0]}")


def allow(stored: StoredTensors, *roles: str) -> None:
    """Raises Unfit where there is a part with another role."""
    if odd := sorted(stored.keys() - set(roles)):
        raise Unfit(f"has {odd[0]}, which does not go with its other parts")


def shape_of(stored: StoredTensors, role: str, dtypes: Collection[str], num_dims: int | None = None) -> tuple[int, ...]:
    """A part's shape.

    Args:
        dtypes: the dtypes that it may have, by safetensors' names.
        num_dims: how many dimensions it must have; None: any number.

    Raises:
        Unfit: the part is missing or empty, or has another dtype or number of dimensions.
    """
    need(stored, role)
    shape = tuple(stored[role].get_shape())
    if stored[role].get_dtype() not in dtypes:
        raise Unfit(f"has {role} of the type {stored[role].get_dtype()}")
    if (num_dims is not None and len(shape) != num_dims) or 0 in shape:
        raise Unfit(f"has {role} of the shape {list(shape)}")
    return shape


def expect(stored: StoredTensors, role: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> None:
    """Raises Unfit unless a part has one of these dtypes and one of these shapes, which fit the other parts."""
    shape = shape_of(stored, role, dtypes)
    if shape not in shapes:
        raise Unfit(f"has {role} of the shape {list(shape)}, which does not fit its other parts")
