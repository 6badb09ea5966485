"""The part of Lua 5.1 that the router's scripts are written in, translated to Python: so the real scripts decide.

Strings are bytes, tables are dictionaries, and a call has one result. Other Lua raises SyntaxError.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

_TOKEN: Final = re.compile(
    r"(?P<space>(?:\s|--[^\n]*)+)|(?P<number>0x[0-9a-fA-F]+|\d+(?:\.\d+)?)|(?P<string>'(?:\\.|[^'\\])*')"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<symbol>\.\.|==|~=|<=|>=|[-+*/%#<>=(){}\[\],.])"
)
_BINARY: Final = {
    "or": 1, "and": 2, "<": 3, ">": 3, "<=": 3, ">=": 3, "==": 3, "~=": 3, "..": 4, "+": 5, "-": 5, "*": 6, "/": 6,
    "%": 6,
}  # fmt: skip
_UNARY: Final = 7
_RESERVED: Final = frozenset(
    ("and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local", "nil", "not", "or",
     "repeat", "return", "then", "true", "until", "while")
)  # fmt: skip


class LuaTable(dict[Any, Any]):
    """A table; lists have the keys 1, 2, 3 and so on."""

    @classmethod
    def of(cls, *values: Any) -> "LuaTable":
        return cls((index, value) for index, value in enumerate(values, 1) if value is not None)

    def values_in_order(self) -> list[Any]:
        """As Redis reads a list: up to the first nil."""
        found: list[Any] = []
        while (value := self.get(len(found) + 1)) is not None:
            found.append(value)
        return found


@functools.cache
def compile_script(text: str) -> Callable[[list[bytes], list[bytes], Callable[..., Any]], Any]:
    """A function of KEYS, ARGV and what carries Redis' commands out."""
    source = _Translation(text).source()
    code = compile(source, "<lua>", "exec")

    def run(keys: list[bytes], arguments: list[bytes], command: Callable[..., Any]) -> Any:
        def protected(*given: Any) -> Any:
            try:
                return command(*given)
            except Exception as failure:
                return LuaTable({b"err": str(failure).encode()})

        redis = LuaTable({b"call": command, b"pcall": protected})
        scope = {**_LIBRARY, "l_KEYS": LuaTable.of(*keys), "l_ARGV": LuaTable.of(*arguments), "l_redis": redis}
        exec(code, scope)  # noqa: S102 - what was translated from the router's own scripts
        return scope["script"]()

    return run


def number(value: Any) -> Any:
    """A value as a number, for arithmetic."""
    if isinstance(value, bytes):
        converted = float(value)
        return int(converted) if converted.is_integer() else converted
    return value


def text_of(value: Any) -> bytes:
    """A value as a string."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"no string: {value!r}")
    return b"%.14g" % value


def _truth(value: Any) -> bool:
    return value is not None and value is not False


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    return type(one) is type(other) and one == other if isinstance(one, bytes | dict) else bool(one == other)


def _index(table: Any, key: Any) -> Any:
    if not isinstance(table, dict):
        raise TypeError("an index of what is no table")
    return table.get(key)


def _set(table: LuaTable, key: Any, value: Any) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, bytes) else len(value.values_in_order())


def _steps(first: Any, last: Any, step: Any = 1) -> range:
    return range(number(first), number(last) + (1 if step > 0 else -1), step)


def _pairs_in_order(table: LuaTable) -> Iterator[tuple[int, Any]]:
    return iter(enumerate(table.values_in_order(), 1))


def _sub(text: bytes, start: int, end: int = -1) -> bytes:
    start = max(1, start if start >= 0 else len(text) + start + 1)
    end = end if end >= 0 else len(text) + end + 1
    return text[start - 1 : max(start - 1, end)]


def _find(text: bytes, what: bytes, start: int = 1, plain: Any = None) -> int | None:
    if not plain:
        raise NotImplementedError("patterns")
    found = text.find(what, start - 1)
    return found + 1 if found >= 0 else None


def _match(text: bytes, pattern: bytes) -> bytes | None:
    if b"%" in pattern or b"-" in pattern:
        raise NotImplementedError("patterns that regular expressions write otherwise")
    found = re.search(pattern, text)
    return found.group() if found is not None else None


def _format(pattern: bytes, *values: Any) -> bytes:
    return pattern % tuple(value if b"%s" in pattern else number(value) for value in values)


def _tonumber(value: Any = None) -> Any:
    try:
        return None if value is None or value is False else number(value)
    except ValueError:
        return None


def _type(value: Any) -> bytes:
    kinds = {bytes: b"string", bool: b"boolean", int: b"number", float: b"number", LuaTable: b"table"}
    return b"nil" if value is None else kinds.get(type(value), b"function")


_LIBRARY: Final[dict[str, Any]] = {
    "truth": _truth, "same": _same, "index": _index, "put": _set, "number": number, "text_of": text_of,
    "length": _length, "steps": _steps, "LuaTable": LuaTable,
    "l_ipairs": _pairs_in_order, "l_tonumber": _tonumber, "l_type": _type, "l_tostring": text_of,
    "l_math": LuaTable({b"floor": lambda value: math.floor(number(value)), b"max": max, b"min": min}),
    "l_string": LuaTable(
        {
            b"sub": _sub, b"find": _find, b"format": _format, b"match": _match, b"len": len,
            b"char": lambda *codes: bytes(codes),
        }
    ),
}  # fmt: skip


class _Translation:
    """A recursive descent over the tokens, which writes Python."""

    def __init__(self, text: str) -> None:
        self._tokens = list(self._tokens_of(text))
        self._at = 0
        self._lines: list[str] = []
        self._num_names = 0

    @staticmethod
    def _tokens_of(text: str) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise SyntaxError(f"not in this part of Lua: {text[at : at + 20]!r}")
            at = match.end()
            if match.lastgroup != "space":
                kind = "word" if match.group() in _RESERVED else match.lastgroup
                yield kind, match.group()
        yield "end", ""

    def source(self) -> str:
        self._write(0, "def script():")
        self._block(1)
        if self._tokens[self._at][0] != "end":
            raise SyntaxError(f"unexpected {self._tokens[self._at][1]}")
        return "\n".join(self._lines)

    # --- tokens ---

    def _is(self, *texts: str) -> bool:
        kind, text = self._tokens[self._at]
        return kind in ("word", "symbol") and text in texts

    def _take(self, *texts: str) -> bool:
        if self._is(*texts):
            self._at += 1
            return True
        return False

    def _need(self, text: str) -> None:
        if not self._take(text):
            raise SyntaxError(f"{text} expected before {self._tokens[self._at][1]!r}")

    def _name(self) -> str:
        kind, text = self._tokens[self._at]
        if kind != "name":
            raise SyntaxError(f"a name expected before {text!r}")
        self._at += 1
        return f"l_{text}"

    def _write(self, depth: int, line: str) -> None:
        self._lines.append("    " * depth + line)

    # --- statements ---

    def _block(self, depth: int) -> None:
        self._write(depth, "pass")
        while not self._is("end", "else", "elseif") and self._tokens[self._at][0] != "end":
            self._statement(depth)

    def _statement(self, depth: int) -> None:
        if self._take("local"):
            if self._take("function"):
                self._function(depth)
            else:
                self._assignment(depth, self._names())
        elif self._take("if"):
            self._condition(depth)
        elif self._take("for"):
            self._loop(depth)
        elif self._take("return"):
            is_bare = self._is("end", "else", "elseif") or self._tokens[self._at][0] == "end"
            self._write(depth, "return None" if is_bare else f"return {self._expression()}")
        else:
            target = self._suffixed()
            if self._is("="):
                self._assignment(depth, [target])
            else:
                self._write(depth, target)

    def _function(self, depth: int) -> None:
        name = self._name()
        self._need("(")
        parameters = [] if self._is(")") else self._names()
        self._need(")")
        given = ", ".join(f"{each}=None" for each in parameters)
        self._write(depth, f"def {name}({given}):")
        self._block(depth + 1)
        self._need("end")

    def _names(self) -> list[str]:
        names = [self._name()]
        while self._take(","):
            names.append(self._name())
        return names

    def _assignment(self, depth: int, targets: list[str]) -> None:
        self._need("=")
        values = self._expressions()
        values += ["None"] * (len(targets) - len(values))
        if len(targets) == 1 and targets[0].startswith("index("):
            self._write(depth, f"put({targets[0].removeprefix('index(').removesuffix(')')}, {values[0]})")
        else:
            self._write(depth, f"{', '.join(targets)} = {', '.join(values)}")

    def _condition(self, depth: int) -> None:
        self._write(depth, f"if truth({self._expression()}):")
        self._need("then")
        self._block(depth + 1)
        while self._take("elseif"):
            self._write(depth, f"elif truth({self._expression()}):")
            self._need("then")
            self._block(depth + 1)
        if self._take("else"):
            self._write(depth, "else:")
            self._block(depth + 1)
        self._need("end")

    def _loop(self, depth: int) -> None:
        names = self._names()
        if self._take("in"):
            walked = self._expression()
        else:
            self._need("=")
            walked = f"steps({', '.join(self._expressions())})"
        self._need("do")
        self._write(depth, f"for {', '.join(names)} in {walked}:")
        self._block(depth + 1)
        self._need("end")

    # --- expressions ---

    def _expressions(self) -> list[str]:
        found = [self._expression()]
        while self._take(","):
            found.append(self._expression())
        return found

    def _expression(self, level: int = 0) -> str:
        left = self._operand()
        while True:
            kind, operator = self._tokens[self._at]
            strength = _BINARY.get(operator, 0) if kind in ("word", "symbol") else 0
            if strength <= level:
                return left
            self._at += 1
            # `..` binds to the right.
            right = self._expression(strength - 1 if operator == ".." else strength)
            left = self._combined(left, operator, right)

    def _combined(self, left: str, operator: str, right: str) -> str:
        match operator:
            case "and" | "or":
                self._num_names += 1
                name = f"t{self._num_names}"
                chosen = (right, name) if operator == "and" else (name, right)
                return f"({chosen[0]} if truth({name} := {left}) else {chosen[1]})"
            case "==":
                return f"same({left}, {right})"
            case "~=":
                return f"(not same({left}, {right}))"
            case "..":
                return f"(text_of({left}) + text_of({right}))"
            case "<" | ">" | "<=" | ">=":
                return f"({left} {operator} {right})"
        return f"(number({left}) {operator} number({right}))"

    def _operand(self) -> str:
        kind, text = self._tokens[self._at]
        if self._take("not"):
            return f"(not truth({self._expression(_UNARY)}))"
        if self._take("#"):
            return f"length({self._expression(_UNARY)})"
        if self._take("-"):
            return f"(-number({self._expression(_UNARY)}))"
        if kind in ("number", "string") or text in ("true", "false", "nil"):
            self._at += 1
            constants = {"true": "True", "false": "False", "nil": "None"}
            return f"b{text}" if kind == "string" else constants.get(text, text)
        if self._take("{"):
            values = [] if self._is("}") else self._expressions()
            self._need("}")
            return f"LuaTable.of({', '.join(values)})"
        return self._suffixed()

    def _suffixed(self) -> str:
        if self._take("("):
            text = self._expression()
            self._need(")")
        else:
            text = self._name()
        while True:
            if self._take("."):
                text = f"index({text}, b'{self._name().removeprefix('l_')}')"
            elif self._take("["):
                text = f"index({text}, {self._expression()})"
                self._need("]")
            elif self._take("("):
                arguments = [] if self._is(")") else self._expressions()
                self._need(")")
                text = f"{text}({', '.join(arguments)})"
            else:
                return text
