"""The stored tensors that one weight is packed in: which they are, by their names, and what they have to be. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol


class Stored(Protocol):
    """A tensor of a file, as safetensors' slices are: what is indexed is read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> Any: ...


Parts = Mapping[str, Stored]
"""By role: what the stored tensor's name says that it is. The ordinary one is `weight`."""


class Unfit(ValueError):
    """The parts are no weight: the sentence says what is wrong with them."""


def grouped(names: Iterable[str], endings: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Which names belong together.

    Args:
        names: of stored tensors.
        endings: of the names of parts, and what stands for each in the weight's name.

    Returns:
        For each weight's name, its parts: role, and name among `names`.
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
    """`qzeros` for `.qzeros`, `absmax` for `.weight.absmax`."""
    return ending.removeprefix(".weight.").lstrip("._")


def need(parts: Parts, *roles: str) -> None:
    """Raises Unfit where a part is missing."""
    if absent := [role for role in roles if role not in parts]:
        raise Unfit(f"has no {absent[0]}")


def allow(parts: Parts, *roles: str) -> None:
    """Raises Unfit where there is a part that no such weight has."""
    if odd := sorted(parts.keys() - set(roles)):
        raise Unfit(f"has {odd[0]}, which does not go with its other parts")


def shape_of(parts: Parts, role: str, dtypes: Collection[str], num_dims: int | None = None) -> tuple[int, ...]:
    """A part's shape.

    Args:
        dtypes: those that it may have, as safetensors calls them.
        num_dims: how many dimensions it has to have; None: any number.

    Raises:
        Unfit: it has others, or no numbers at all.
    """
    need(parts, role)
    shape = tuple(parts[role].get_shape())
    if parts[role].get_dtype() not in dtypes:
        raise Unfit(f"has {role} of the type {parts[role].get_dtype()}")
    if (num_dims is not None and len(shape) != num_dims) or 0 in shape:
        raise Unfit(f"has {role} of the shape {list(shape)}")
    return shape


def expect(parts: Parts, role: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> None:
    """Raises Unfit where a part has none of the shapes that fit the others."""
    shape = shape_of(parts, role, dtypes)
    if shape not in shapes:
        raise Unfit(f"has {role} of the shape {list(shape)}, which does not fit its other parts")
