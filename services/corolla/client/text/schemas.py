"""JSON Schemas that answers must fit: what they allow, and which of their keywords grammars cannot follow. Pure.

An object has the properties that its schema names, and no others, unless the schema says otherwise: by having no
`properties` at all, or by `additionalProperties` or `unevaluatedProperties` other than false. What a schema names
includes what `$ref`, `allOf` and its like bring to the same object. A model that may invent properties often invents
them without end.

The schema for llguidance has only keywords that llguidance follows, and names no rule of its own: it means the same to
each version that reads it.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from pydantic_core import from_json

from corolla.chassis.errors import InvalidRequest
from corolla.client.text.schema_keywords import (
    FOLLOWED,
    LEFT_OUT,
    NEUTRAL,
    SAYS_NOTHING,
    SIMPLE,
    begin_differently,
    count_of,
    have_no_common_value,
    is_number,
    listed_values,
    types_of,
)

MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_SCHEMA_DEPTH: Final = 64
_MAX_PARTS: Final = 50_000
"""The most subschemas and names that a schema for llguidance may get: schemas can multiply what they refer to."""
_MAX_STEPS: Final = 64
"""The most schemas that may apply to one value by way of one another."""

# The layout is that of `json.dumps`, which models know best, and of `tojson` in chat templates, so that the next turn
# renders a call to the same text. With free spaces, a model might never end.
_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "item_separator": ", ",
        "key_separator": ": ",
        "whitespace_flexible": False,
        "coerce_one_of": False,
        "lenient": False,
    }
)
_IN_PLACE: Final = ("$ref", "allOf", "anyOf", "oneOf")
_CONDITIONS: Final = ("if", "then", "else")


@dataclass(frozen=True, slots=True)
class FollowedSchema:
    """A schema as grammars follow it.

    Attributes:
        schema: the schema for llguidance.
        ignored: the places of the keywords that it leaves out, such as `properties.tags.uniqueItems`.
        patterns: its regular expressions, which llguidance may refuse.
    """

    schema: Mapping[str, Any]
    ignored: tuple[str, ...] = ()
    patterns: frozenset[str] = frozenset()


def parsed(text: str, name: str) -> dict[str, Any]:
    """The schema that a caller wrote as the field `name`. Raises InvalidRequest."""
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(name, f"must have at most {MAX_SCHEMA_BYTES >> 10} KiB")
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be an object in JSON")
    if depth_of(value) > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(name, f"must be at most {MAX_SCHEMA_DEPTH} deep")
    return value


def depth_of(value: Any) -> int:
    """The depth of a value: 1 for an object of plain values. A loop computes it, since callers choose the depth."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def followed(
    schema: Mapping[str, Any], name: str, *, is_strict: bool, unreadable: Collection[str] = ()
) -> FollowedSchema:
    """The schema as grammars follow it.

    Args:
        name: the field that holds the schema; the places of ignored keywords begin with it.
        is_strict: whether a keyword that grammars cannot follow is refused.
        unreadable: the regular expressions that llguidance refuses, which are left out.

    Raises InvalidRequest.
    """
    reader = _Reader(schema, name, frozenset(unreadable))
    made = reader.whole()
    ignored = tuple(f"{name}.{each}" for each in reader.ignored)
    if ignored and is_strict:
        raise InvalidRequest(name, f"is strict, and grammars cannot follow {', '.join(reader.ignored)}")
    return FollowedSchema({**made, "x-guidance": dict(_OPTIONS)}, ignored, frozenset(reader.patterns))


@dataclass(frozen=True, slots=True)
class _Names:
    """The properties that a schema names for an object, and patterns of further ones.

    Attributes:
        is_said: whether there is a `properties`, so that the object is closed.
        is_open: whether the schema allows further properties in so many words.
    """

    names: Mapping[str, None] = field(default_factory=dict)
    patterns: Mapping[str, None] = field(default_factory=dict)
    is_said: bool = False
    is_open: bool = False

    def __or__(self, other: "_Names") -> "_Names":
        return _Names(
            {**self.names, **other.names},
            {**self.patterns, **other.patterns},
            self.is_said or other.is_said,
            self.is_open or other.is_open,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.names), tuple(self.patterns), self.is_said, self.is_open


_NO_NAMES: Final = _Names()


@dataclass(frozen=True, slots=True)
class _Placed:
    """A schema, or a part of one, and where in the whole schema it stands."""

    value: Any
    place: tuple[str, ...] = ()

    def at(self, *steps: str) -> "_Placed":
        value = self.value
        for step in steps:
            value = value[int(step)] if isinstance(value, list) else value[step]
        return _Placed(value, (*self.place, *steps))

    @property
    def each(self) -> list["_Placed"]:
        return [_Placed(value, (*self.place, str(index))) for index, value in enumerate(self.value)]


@dataclass(slots=True)
class _Flat:
    """What applies to one value together: schemas without others in their place, and groups of alternatives."""

    leaves: list[_Placed] = field(default_factory=list)
    groups: list[_Placed] = field(default_factory=list)
    has_reference: bool = False


class _Reader:
    """Reads one schema."""

    def __init__(self, schema: Mapping[str, Any], name: str, unreadable: frozenset[str]) -> None:
        self._root = _Placed(schema)
        self._name = name
        self._unreadable = unreadable
        self._num_parts = 0
        self._num_steps = 0
        self._ids = dict(_ids(self._root))
        self._definitions: dict[str, Any] = {}
        self._references: dict[tuple[Any, ...], str] = {}
        self._unmade: deque[tuple[str, Callable[[], Any]]] = deque()
        self._names: dict[tuple[str, ...], _Names] = {}
        self.ignored: dict[str, None] = {}
        self.patterns: set[str] = set()

    def whole(self) -> dict[str, Any]:
        made = self._schema(self._root, _NO_NAMES)
        while self._unmade:
            reference, make = self._unmade.popleft()
            self._definitions[reference] = make()
        found = made if isinstance(made, dict) else {} if made else {"anyOf": [False]}
        return {**found, "$defs": self._definitions} if self._definitions else found

    # --- one schema ----------------------------------------------------------------------------------------------

    def _schema(self, given: _Placed, outer: _Names | None) -> Any:
        """The schema for llguidance.

        Args:
            outer: what other schemas name for the same object; None: another schema closes the object.
        """
        self._count()
        schema = given.value
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._ignore(given)
            return True
        if (target := self._only_reference(given)) is not None and outer is not None and outer.key == _NO_NAMES.key:
            return self._definition(("closed", *target.place), lambda: self._schema(target, outer))
        flat = self._flat(given)
        if flat.has_reference:
            key = (given.place, None if outer is None else outer.key)
            return self._definition(key, lambda: self._composed(given, flat, outer))
        return self._composed(given, flat, outer)

    def _definition(self, key: tuple[Any, ...], make: Callable[[], Any]) -> dict[str, str]:
        """A reference to what `make` will return, or has returned for this key."""
        if key not in self._references:
            self._references[key] = str(len(self._references))
            self._unmade.append((self._references[key], make))
        return {"$ref": f"#/$defs/{self._references[key]}"}

    def _composed(self, given: _Placed, flat: _Flat, outer: _Names | None) -> Any:
        parts = self._parts(flat, outer)
        made = parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True
        return {"anyOf": [made, {"type": "null"}]} if given.value.get("nullable") is True else made

    def _parts(self, flat: _Flat, outer: _Names | None) -> list[Any]:
        named = _NO_NAMES
        for leaf in flat.leaves:
            named |= self._own_names(leaf)
        types = types_of(leaf.value for leaf in flat.leaves)
        if types is not None and "object" not in types:
            outer = None  # there is nothing to close
        is_alone = not flat.groups and len(flat.leaves) == 1
        if not is_alone and named.patterns:
            named = _Names(named.names, {}, named.is_said, is_open=True)
        is_closed = outer is not None and not named.is_open
        known = named if outer is None else named | outer
        if is_alone:
            (leaf,) = flat.leaves
            return [self._leaf(leaf, known if is_closed and known.is_said else None, is_alone=True)]
        made = [self._leaf(leaf, None, is_alone=False) for leaf in flat.leaves]
        of_groups = [_union(map(self._all_names, group.each)) for group in flat.groups]
        for index, group in enumerate(flat.groups):
            others = known | _union(names for place, names in enumerate(of_groups) if place != index)
            others = _Names(others.names, {}, known.is_said)
            made.append({"anyOf": [self._schema(each, others if is_closed else None) for each in group.each]})
            if group.place[-1:] == ("oneOf",) and not self._are_disjoint(group.each, types):
                self._ignore(group)
        if is_closed and known.is_said and not flat.groups:
            made.append(self._closure(known))
        return [each for each in made if each not in (True, {})]

    def _closure(self, known: _Names) -> dict[str, Any]:
        self._count(len(known.names))
        return {"properties": dict.fromkeys(known.names, True), "additionalProperties": False}

    # --- what stands in the same place ---------------------------------------------------------------------------

    def _only_reference(self, given: _Placed) -> _Placed | None:
        """What a schema refers to, if it says nothing else."""
        schema = given.value
        if isinstance(schema.get("$ref"), str) and not (FOLLOWED | NEUTRAL.keys()) & schema.keys():
            return self._target(given.at("$ref"))
        if isinstance(many := schema.get("allOf"), list) and len(many) == 1 and isinstance(many[0], dict):
            rest = schema.keys() - {"allOf"}
            if not (FOLLOWED | NEUTRAL.keys() | {"$ref"}) & rest:
                return self._only_reference(given.at("allOf", "0"))
        return None

    def _flat(self, given: _Placed) -> _Flat:
        flat = _Flat()
        self._flatten(given, flat, ())
        return flat

    def _flatten(self, given: _Placed, flat: _Flat, passed: tuple[tuple[str, ...], ...]) -> None:
        self._count()
        schema = given.value
        if isinstance(schema, bool):
            if not schema:
                flat.groups.append(_Placed([False], given.place))
            return
        if not isinstance(schema, dict) or given.place in passed:
            self._ignore(given)
            return
        if len(passed) == _MAX_STEPS:
            raise self._too_complex()
        passed = (*passed, given.place)
        own = [name for name in schema if name in FOLLOWED or name in NEUTRAL]
        first_own = "properties" if "properties" in own else next(iter(own), None)
        for name in schema:  # properties come in the order in which the schema has them
            if name in _IN_PLACE:
                self._flatten_in_place(given.at(name), flat, passed)
            elif name == first_own:
                flat.leaves.append(given)

    def _flatten_in_place(self, part: _Placed, flat: _Flat, passed: tuple[tuple[str, ...], ...]) -> None:
        """Adds what one keyword of a schema says about the schema's own value."""
        name, value = part.place[-1], part.value
        if name == "$ref":
            target = self._target(part) if isinstance(value, str) else None
            if target is None or target.place in passed:
                self._ignore(part)
                return
            flat.has_reference = True
            self._flatten(target, flat, passed)
        elif not isinstance(value, list):
            self._ignore(part)
        elif name == "allOf":
            for each in part.each:
                self._flatten(each, flat, passed)
        else:
            flat.groups.append(part)

    def _own_names(self, leaf: _Placed) -> _Names:
        """The names that a schema itself has, without the schemas that apply in the same place."""
        if leaf.place not in self._names:
            self._names[leaf.place] = self._read_names(leaf)
        return self._names[leaf.place]

    def _read_names(self, leaf: _Placed) -> _Names:
        schema = leaf.value
        properties, required = schema.get("properties"), schema.get("required")
        is_said = isinstance(properties, dict)
        names: dict[str, None] = dict.fromkeys(properties) if is_said else {}
        if isinstance(required, list) and schema.get("additionalProperties") is not False:
            names.update(dict.fromkeys(each for each in required if isinstance(each, str)))
        patterns = schema.get("patternProperties")
        readable = isinstance(patterns, dict) and not any(each in self._unreadable for each in patterns)
        is_open = (patterns is not None and not readable) or any(
            schema.get(name, False) is not False for name in ("additionalProperties", "unevaluatedProperties")
        )
        # Conditions are left out, but what they name may come.
        for part in _conditional(leaf):
            names.update(self._all_names(part).names)
        fewest = schema.get("minProperties")
        if is_said and is_number(fewest) and fewest > len(names):
            is_open = True
        self._count(len(names))
        return _Names(
            names, dict.fromkeys(patterns) if readable and patterns else {}, is_said or bool(patterns), is_open
        )

    def _all_names(self, given: _Placed) -> _Names:
        """The names in a schema and in what stands in its place."""
        if not isinstance(given.value, dict):
            return _NO_NAMES
        key = ("all", *given.place)
        if key not in self._names:
            self._names[key] = _NO_NAMES  # for one that refers to itself
            self._num_steps += 1
            if self._num_steps > _MAX_STEPS:
                raise self._too_complex()
            flat = self._flat(given)
            parts = [
                *map(self._own_names, flat.leaves),
                *(self._all_names(each) for group in flat.groups for each in group.each),
            ]
            self._names[key] = _union(parts)
            self._num_steps -= 1
        return self._names[key]

    def _are_disjoint(self, options: Sequence[_Placed], within: frozenset[str] | None) -> bool:
        """It is plain that no value fits two of the schemas: by their types, or by a property that tells.

        Args:
            within: the types that the values have in any case; None: any.
        """
        options = [each for each in options if each.value is not False]
        if len(options) < 2:
            return True
        objects: list[dict[str, list[Any]]] = []
        seen: list[tuple[frozenset[str], list[Any] | None]] = []
        for option in options:
            leaves = self._flat(option).leaves if isinstance(option.value, dict) else []
            types = types_of(leaf.value for leaf in leaves)
            if within is not None:
                types = within if types is None else types & within
            if types == frozenset({"object"}):
                objects.append(self._tags(leaves))
            elif types is None:
                return False
            else:
                listed = next((found for leaf in leaves if (found := listed_values(leaf.value)) is not None), None)
                seen.append((types, listed))
        by_type: dict[str, list[list[Any] | None]] = {}
        for types, listed in seen:
            for each in types:
                by_type.setdefault("number" if each == "integer" else each, []).append(listed)
        if "object" in by_type and objects:
            return False
        if any(len(found) > 1 and not have_no_common_value(found) for found in by_type.values()):
            return False
        common = set(objects[0]).intersection(*objects[1:]) if objects else set()
        return len(objects) < 2 or any(have_no_common_value([each[name] for each in objects]) for name in common)

    def _tags(self, leaves: Iterable[_Placed]) -> dict[str, list[Any]]:
        """The required properties of an object that have one of some values."""
        tags: dict[str, list[Any]] = {}
        required: set[str] = set()
        for leaf in leaves:
            if isinstance(names := leaf.value.get("required"), list):
                required.update(each for each in names if isinstance(each, str))
            if isinstance(properties := leaf.value.get("properties"), dict):
                for name, schema in properties.items():
                    if isinstance(schema, dict) and (listed := listed_values(schema)) is not None:
                        tags[name] = listed
        return {name: listed for name, listed in tags.items() if name in required}

    def _target(self, reference: _Placed) -> _Placed | None:
        """The schema that a `$ref` names; None if the whole schema does not hold it."""
        address, fragment = _address(self._base_of(reference), reference.value)
        if (found := self._ids.get((address, ""))) is None:
            return None
        if not fragment.startswith("/"):
            return self._ids.get((address, fragment))
        try:
            return found.at(*(unquote(step).replace("~1", "/").replace("~0", "~") for step in fragment[1:].split("/")))
        except (KeyError, IndexError, ValueError, TypeError):
            return None

    def _base_of(self, part: _Placed) -> str:
        """The address to which references in this part are relative."""
        base, value = "", self._root.value
        for step in part.place:
            if isinstance(value, dict) and isinstance(own := value.get("$id"), str):
                base = _address(base, own)[0]
            value = value[int(step)] if isinstance(value, list) else value[step]
        return base

    # --- a schema without others in its place --------------------------------------------------------------------

    def _leaf(self, leaf: _Placed, closed_by: _Names | None, *, is_alone: bool) -> dict[str, Any]:
        """The keywords of a schema, without those in `_IN_PLACE`.

        Args:
            closed_by: all that may be in the object; None: it may have more, or another schema closes it.
            is_alone: whether no other schema applies to the same value.
        """
        schema = leaf.value
        made: dict[str, Any] = {}
        for name, is_neutral in NEUTRAL.items():
            if (
                name in schema
                and not is_neutral(schema[name])
                and not (name == "propertyNames" and is_alone and self._keys(leaf) is not None)
            ):
                self._ignore(leaf.at(name))
        for name, value in schema.items():
            if (read := SIMPLE.get(name)) is not None:
                kept = read(value, schema)
                if kept is LEFT_OUT:
                    self._ignore(leaf.at(name))
                elif kept is not SAYS_NOTHING:
                    made[name] = kept
        self._read_pattern(leaf, made)
        self._read_items(leaf, made)
        self._read_properties(leaf, made, closed_by, is_alone=is_alone)
        return made

    def _read_pattern(self, leaf: _Placed, made: dict[str, Any]) -> None:
        pattern = leaf.value.get("pattern")
        if isinstance(pattern, str) and pattern not in self._unreadable:
            made["pattern"] = pattern
            self.patterns.add(pattern)
        elif "pattern" in leaf.value:
            self._ignore(leaf.at("pattern"))

    def _read_items(self, leaf: _Placed, made: dict[str, Any]) -> None:
        """Reads the schemas of a list's items; earlier drafts call those of the first ones `items`, too."""
        schema = leaf.value
        first, rest = (
            ("items", "additionalItems") if isinstance(schema.get("items"), list) else ("prefixItems", "items")
        )
        if isinstance(schema.get(first), list):
            made["prefixItems"] = [self._schema(each, _NO_NAMES) for each in leaf.at(first).each]
        elif first in schema:
            self._ignore(leaf.at(first))
        if rest in schema:
            made["items"] = self._schema(leaf.at(rest), _NO_NAMES)

    def _read_properties(
        self, leaf: _Placed, made: dict[str, Any], closed_by: _Names | None, *, is_alone: bool
    ) -> None:
        schema = leaf.value
        properties: dict[str, Any] = {}
        if isinstance(schema.get("properties"), dict):
            given = leaf.at("properties")
            properties = {name: self._schema(given.at(name), _NO_NAMES) for name in given.value}
        elif "properties" in schema:
            self._ignore(leaf.at("properties"))
        required = schema.get("required")
        if isinstance(required, list) and all(isinstance(each, str) for each in required):
            made["required"] = list(dict.fromkeys(required))
        elif "required" in schema:
            self._ignore(leaf.at("required"))
        if closed_by is not None:
            self._count(len(closed_by.names))
            properties |= {name: True for name in closed_by.names if name not in properties}
        if properties or "properties" in schema:
            made["properties"] = properties
        self._read_other_properties(leaf, made, closed_by, is_alone=is_alone)
        self._read_numbers_of_properties(leaf, made, is_alone=is_alone)

    def _read_other_properties(
        self, leaf: _Placed, made: dict[str, Any], closed_by: _Names | None, *, is_alone: bool
    ) -> None:
        schema, patterns = leaf.value, leaf.value.get("patternProperties")
        if closed_by is not None:
            made["additionalProperties"] = False
        elif "additionalProperties" in schema:
            made["additionalProperties"] = self._schema(leaf.at("additionalProperties"), _NO_NAMES)
        elif schema.get("unevaluatedProperties", False) not in (True, False, {}):
            if is_alone:
                made["additionalProperties"] = self._schema(leaf.at("unevaluatedProperties"), _NO_NAMES)
            else:
                self._ignore(leaf.at("unevaluatedProperties"))
        if is_alone and (keys := self._keys(leaf)) is not None:
            kept = made.pop("additionalProperties", True)
            made |= {"properties": dict.fromkeys(keys, kept), "additionalProperties": False}
        if patterns is None or patterns == {}:
            return
        given = leaf.at("patternProperties")
        # What several schemas say of patterns together is beyond grammars.
        if not is_alone or not isinstance(patterns, dict) or any(each in self._unreadable for each in patterns):
            self._ignore(given)
            made.pop("additionalProperties", None)
            return
        read = {pattern: self._schema(given.at(pattern), _NO_NAMES) for pattern in patterns}
        if len(read) > 1 and not begin_differently(read):
            # llguidance takes only patterns that no name matches twice.
            self._ignore(given)
            read = {"|".join(f"(?:{each})" for each in read): {"anyOf": list(read.values())}}
        self.patterns.update(patterns)
        made["patternProperties"] = read

    def _keys(self, leaf: _Placed) -> list[str] | None:
        """The only names of properties by `propertyNames`, if it lists them and nothing else names any."""
        schema = leaf.value
        if "propertyNames" not in schema or "properties" in schema or "patternProperties" in schema:
            return None
        names = leaf.at("propertyNames")
        if isinstance(names.value, dict) and "$ref" in names.value:
            names = self._only_reference(names) or names
        listed = listed_values(names.value) if isinstance(names.value, dict) else None
        return listed if listed and all(isinstance(each, str) for each in listed) else None

    def _read_numbers_of_properties(self, leaf: _Placed, made: dict[str, Any], *, is_alone: bool) -> None:
        """Reads how many properties an object may have. llguidance counts only those that need not be there."""
        properties, required = made.get("properties", {}), frozenset(made.get("required", ()))
        is_closed = made.get("additionalProperties") is False and "patternProperties" not in made
        counts = {name: count_of(leaf.value.get(name)) for name in ("minProperties", "maxProperties")}
        fewest, most = counts["minProperties"], counts["maxProperties"]
        if fewest is not None and fewest <= len(required):
            fewest = None
        if most is not None and is_closed and most >= len(properties.keys() | required):
            most = None
        is_possible = is_alone and (
            properties.keys() <= required
            or (is_closed and not required and (fewest, most) in ((1, None), (None, 1), (1, 1)))
        )
        for name, count in (("minProperties", fewest), ("maxProperties", most)):
            is_wrong = name in leaf.value and counts[name] is None
            if is_wrong or (count is not None and not is_possible):
                self._ignore(leaf.at(name))
            elif count is not None:
                made[name] = count

    # --- what is counted -----------------------------------------------------------------------------------------

    def _ignore(self, part: _Placed) -> None:
        self.ignored[".".join(part.place)] = None

    def _count(self, number: int = 1) -> None:
        self._num_parts += number
        if self._num_parts > _MAX_PARTS:
            raise self._too_complex()

    def _too_complex(self) -> InvalidRequest:
        return InvalidRequest(self._name, "must not be so complex: its parts refer to each other too often")


def _union(many: Iterable[_Names]) -> _Names:
    found = _NO_NAMES
    for each in many:
        found |= each
    return found


def _conditional(leaf: _Placed) -> Iterator[_Placed]:
    """Yields the schemas that may apply to the same object, under conditions that grammars cannot follow."""
    for name in _CONDITIONS:
        if isinstance(leaf.value.get(name), dict):
            yield leaf.at(name)
    for name in ("dependentSchemas", "dependencies"):
        if isinstance(many := leaf.value.get(name), dict):
            yield from (leaf.at(name, each) for each, value in many.items() if isinstance(value, dict))


def _ids(root: _Placed) -> Iterator[tuple[tuple[str, str], _Placed]]:
    """Yields each schema that has a name by `$id` or an anchor, with its address and the name of its fragment."""
    parts: list[tuple[_Placed, str]] = [(root, "")]
    yield ("", ""), root
    while parts:
        part, base = parts.pop()
        value = part.value
        if isinstance(value, dict):
            if isinstance(given := value.get("$id"), str):
                base, fragment = _address(base, given)
                yield (base, fragment), part
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(given := value.get(name), str):
                    yield (base, given), part
            parts += [(part.at(name), base) for name in value if name not in ("enum", "const", "default", "examples")]
        elif isinstance(value, list):
            parts += [(each, base) for each in part.each]


def _address(base: str, reference: str) -> tuple[str, str]:
    """The address and the fragment that a reference means where `base` is the address of what contains it."""
    if reference.startswith("#"):
        return base, reference[1:]
    try:
        address, fragment = urldefrag(urljoin(base, reference))
    except ValueError:
        return reference, ""
    return address, fragment
