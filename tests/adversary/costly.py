"""Requests with each list, text and number of a protocol at its largest: alone, in pairs, and nested.

They come from the descriptors of gRPC's protocol and from the OpenAPI document, so a new field has its requests, too.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from corolla.http.openapi import OPERATIONS, document

MOST_BYTES: Final = (4 << 20) - 4096
"""A little less than the service reads."""
ALLOWED: Final = (16, 20, 2**31 - 1)
"""Numbers that some field allows at most, and one that none does."""
_DEEP: Final = (9, 90)
_MOST_NESTED: Final = 3


@dataclass(frozen=True, slots=True)
class Costly:
    """A request.

    Attributes:
        name: which fields are how large.
        make: its bytes.
    """

    name: str
    make: Callable[[], bytes]


# --- gRPC -------------------------------------------------------------------------------------------------------------

Path = tuple[FieldDescriptor, ...]
Put = Callable[[Message], None]
"""Writes a value into a message."""


def rpc_paths(descriptor: Descriptor, above: Path = ()) -> Iterator[Path]:
    """The ways to each field, through messages that are not within themselves."""
    for field in descriptor.fields:
        path = (*above, field)
        yield path
        inner: Any = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            continue
        if sum(each.message_type is inner for each in path) == 1:
            yield from rpc_paths(inner, path)


def _holder(message: Any, path: Path) -> Any:
    """The message that has the last field of a path; lists get one element."""
    for field in path[:-1]:
        inner = getattr(message, field.name)
        message = (inner[0] if inner else inner.add()) if field.is_repeated else inner
    return message


def _text(num_bytes: int, words: str) -> str:
    return (words * (num_bytes // len(words) + 1))[:num_bytes]


def rpc_puts(path: Path, num_bytes: int, texts: Sequence[str]) -> Iterator[tuple[str, Put]]:
    """What writes the field at a path at its largest, in several ways."""
    field = path[-1]
    name = ".".join(each.name for each in path)
    for words, put in _puts(field, num_bytes, texts):
        yield f"{name}: {words}", partial(_put_within, path, put)


def _put_within(path: Path, put: Callable[[Any, str], None], message: Message) -> None:
    put(_holder(message, path), path[-1].name)


def _puts(
    field: FieldDescriptor, num_bytes: int, texts: Sequence[str]
) -> Iterator[tuple[str, Callable[[Any, str], None]]]:
    """What writes a field of a message that is given with the field's name."""
    if field.message_type is not None:
        yield from _puts_of_messages(field, num_bytes)
    elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        for text in texts:
            yield (
                f"{text!r}",
                partial(_write, [_text(num_bytes, text)] if field.is_repeated else _text(num_bytes, text)),
            )
            if field.is_repeated:
                yield f"many {text!r}", partial(_write, [text] * (num_bytes // (len(text) + 2)))
    elif field.is_repeated:
        yield "many", partial(_write, [1] * num_bytes)
    elif field.type == FieldDescriptor.TYPE_BOOL:
        yield "true", partial(_write, True)
    elif field.enum_type is None:
        yield from ((str(number), partial(_write, number)) for number in ALLOWED)


def _puts_of_messages(field: FieldDescriptor, num_bytes: int) -> Iterator[tuple[str, Callable[[Any, str], None]]]:
    inner: Any = field.message_type
    if inner.GetOptions().map_entry:
        yield "many", partial(_fill_map, inner, num_bytes)
    elif field.is_repeated:
        yield from ((str(number), partial(_add, inner, number)) for number in (num_bytes // 2, *ALLOWED[:2]))
    elif inner.full_name == "google.protobuf.Struct":
        yield from ((f"{depth} deep", partial(_nest, depth)) for depth in _DEEP)


def _write(value: Any, holder: Any, name: str) -> None:
    if isinstance(value, list):
        getattr(holder, name).extend(value)
    else:
        setattr(holder, name, value)


def _add(inner: Descriptor, number: int, holder: Any, name: str) -> None:
    """Adds messages, each as short as can be, or a copy of one that is there."""
    values = getattr(holder, name)
    element = message_factory.GetMessageClass(inner)()
    if values:
        element.CopyFrom(values[0])
    values.extend([element] * min(number, MOST_BYTES // (2 + element.ByteSize())))


def _fill_map(inner: Descriptor, num_bytes: int, holder: Any, name: str) -> None:
    found, value = getattr(holder, name), inner.fields_by_name["value"]
    is_number = inner.fields_by_name["key"].cpp_type == FieldDescriptor.CPPTYPE_UINT32
    for number in range(num_bytes // 16):
        key = number if is_number else f"a{number}"
        if value.message_type is not None:
            found[key].SetInParent()
        else:
            found[key] = 1


def _nest(depth: int, holder: Any, name: str) -> None:
    struct = getattr(holder, name)
    for _ in range(depth // 3):
        struct = struct.fields["a"].struct_value
    struct.fields["a"].number_value = 1


def rpc_requests(method: MethodDescriptor, base: Message, texts: Sequence[str], *, pairs: bool) -> Iterator[Costly]:
    """The requests of a method of gRPC.

    Args:
        base: a request that is answered, and that each of them changes.
        texts: what long texts repeat.
        pairs: whether two fields are large, each half as large as it could be.
    """
    paths = list(rpc_paths(method.input_type))
    if not pairs:
        for path in paths:
            for name, put in rpc_puts(path, MOST_BYTES - base.ByteSize(), texts):
                yield Costly(f"{method.name} {name}", partial(_changed, base, put))
        return
    found = [each for path in paths for each in itertools.islice(rpc_puts(path, MOST_BYTES // 2, texts[:1]), 1)]
    for (name, put), (other_name, other_put) in itertools.combinations(found, 2):
        yield Costly(f"{method.name} {name}, {other_name}", partial(_changed, base, put, other_put))


def _changed(base: Message, *puts: Put) -> bytes:
    message = type(base)()
    message.CopyFrom(base)
    for put in puts:
        put(message)
    return message.SerializeToString()


# --- HTTP -------------------------------------------------------------------------------------------------------------

Schema = Mapping[str, Any]
Keys = tuple[str | int, ...]


class HttpSchemas:
    """The schemas of the bodies of all operations."""

    def __init__(self) -> None:
        self._document = document(OPERATIONS)
        self.operations = [each for each in OPERATIONS if each.body is not None]

    def of(self, body: type) -> Schema:
        found: Schema = self._document["components"]["schemas"][body.__name__]
        return found

    def choices(self, schema: Schema) -> Iterator[Schema]:
        """The schemas without references and alternatives."""
        if "$ref" in schema:
            yield from self.choices(self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
        elif inner := schema.get("anyOf") or schema.get("oneOf"):
            for each in inner:
                yield from self.choices(each)
        else:
            yield schema

    def least(self, schema: Schema) -> Any:
        """A short value."""
        choice = next(each for each in self.choices(schema) if each.get("type") != "null")
        if "const" in choice or "enum" in choice:
            return choice["const"] if "const" in choice else choice["enum"][0]
        match choice.get("type"):
            case "object":
                needed = choice.get("required", ())
                return {name: self.least(choice["properties"][name]) for name in needed}
            case "array":
                return [self.least(choice["items"])]
            case "integer" | "number":
                return choice.get("minimum", 1) if choice.get("minimum", 0) > -1 else 1
            case "boolean":
                return False
            case _:
                return "a"

    def fields(self, schema: Schema, above: Keys = ()) -> Iterator[tuple[Keys, Schema]]:
        """Each field with the keys that lead to it, and each of its alternatives."""
        for choice in self.choices(schema):
            for name, inner in choice.get("properties", {}).items():
                for each in self.choices(inner):
                    yield (*above, name), each
                    deeper = each.get("items", each) if each.get("type") == "array" else each
                    keys: Keys = (*above, name, 0) if each.get("type") == "array" else (*above, name)
                    if len(keys) < 2 * _MOST_NESTED:
                        yield from self.fields(deeper, keys)

    def values(self, schema: Schema, num_bytes: int, texts: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What makes values at their largest, in several ways."""
        match schema.get("type"):
            case "string" if "const" not in schema and "enum" not in schema:
                yield from ((repr(text), partial(_text, num_bytes, text)) for text in texts)
            case "integer" | "number":
                yield from ((str(number), partial(int, number)) for number in ALLOWED)
            case "boolean":
                yield "true", partial(bool, 1)
            case "array":
                element = self.least(schema["items"])
                most = num_bytes // (len(json.dumps(element)) + 1)
                numbers = {most, min(most, schema.get("maxItems", most)), min(most, 64)}
                yield from (
                    (str(number), partial(_repeated, element, number)) for number in sorted(numbers, reverse=True)
                )
                if "string" in {each.get("type") for each in self.choices(schema["items"])}:
                    yield from ((f"one of {text!r}", partial(_one_of, num_bytes, text)) for text in texts)
            case "object" | None:
                yield "many names", lambda: {f"a{number}": 1 for number in range(num_bytes // 12)}
                yield "many lists", lambda: {"a": [[]] * (num_bytes // 4)}
                yield from ((f"{depth} deep", partial(_nested, depth)) for depth in _DEEP)

    def requests(self, body: type, texts: Sequence[str], *, pairs: bool) -> Iterator[Costly]:
        """The requests of an operation."""
        schema, base = self.of(body), self.base(body)
        fields = list(dict.fromkeys((keys, json.dumps(each, sort_keys=True)) for keys, each in self.fields(schema)))
        room = MOST_BYTES - 256
        if not pairs:
            for keys, text in fields:
                for name, value in self.values(json.loads(text), room, texts):
                    yield Costly(f"{_shown(keys)}: {name}", partial(self._made, schema, base, (keys, value)))
            # What the schema does not know is read as well.
            for name, value in self.values({}, room, texts):
                yield Costly(f"unknown: {name}", partial(self._made, schema, base, (("unknown",), value)))
            return
        found = [
            (keys, each)
            for keys, each in ((keys, json.loads(text)) for keys, text in fields)
            if self._counts(keys, each)
        ]
        for (one, schema_of_one), (other, schema_of_other) in itertools.combinations(found, 2):
            if one[: len(other)] == other or other[: len(one)] == one:
                continue
            (name, value), (other_name, other_value) = (
                next(self.values(each, room // 2, texts)) for each in (schema_of_one, schema_of_other)
            )
            shown = f"{_shown(one)}: {name}, {_shown(other)}: {other_name}"
            yield Costly(shown, partial(self._made, schema, base, (one, value), (other, other_value)))

    @staticmethod
    def _counts(keys: Keys, schema: Schema) -> bool:
        """Whether a field can multiply another one: a list, a text or a whole number that is not far within others."""
        return (
            len(keys) <= 3
            and schema.get("type") in ("array", "string", "integer")
            and "const" not in schema
            and "enum" not in schema
        )

    def base(self, body: type) -> dict[str, Any]:
        """A short body that is answered soon."""
        least = dict(self.least(self.of(body)))
        names = self.of(body)["properties"]
        for name in ("max_tokens", "max_output_tokens"):
            if name in names:
                least[name] = 1
        if "prompt" in names:
            least["prompt"] = "the thin man"
        if "input" in names:
            least["input"] = "the thin man"
        return least

    def _made(self, schema: Schema, base: Mapping[str, Any], *puts: tuple[Keys, Callable[[], Any]]) -> bytes:
        body = json.loads(json.dumps(base))
        for keys, value in puts:
            self._put(body, schema, keys, value())
        return json.dumps(body, separators=(",", ":")).encode()

    def _put(self, body: Any, schema: Schema, keys: Keys, value: Any) -> None:
        """Sets the value at some keys; what leads there is as short as can be."""
        for key, following in itertools.pairwise(keys):
            inner = [each for each in self._inner(schema, key) if self._has(each, following)]
            schema = inner[0] if inner else {}
            if not self._leads(body.get(key) if isinstance(key, str) else body[key], following):
                body[key] = self.least(schema) if schema else {}
            body = body[key]
        body[keys[-1]] = value

    def _inner(self, schema: Schema, key: str | int) -> list[Schema]:
        found: list[Schema] = []
        for choice in self.choices(schema):
            inner = choice.get("items") if isinstance(key, int) else choice.get("properties", {}).get(key)
            found += self.choices(inner) if inner is not None else ()
        return found

    def _has(self, schema: Schema, key: str | int) -> bool:
        return schema.get("type") == "array" if isinstance(key, int) else key in schema.get("properties", {})

    def _leads(self, value: Any, key: str | int) -> bool:
        return isinstance(value, list if isinstance(key, int) else dict) and bool(value)


def _repeated(element: Any, number: int) -> list[Any]:
    return [element] * number


def _one_of(num_bytes: int, text: str) -> list[str]:
    return [_text(num_bytes, text)]


def _nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def _shown(keys: Keys) -> str:
    return ".".join(map(str, keys))
