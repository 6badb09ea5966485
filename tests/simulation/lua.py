"""Runs scripts in Lua 5.1 as Redis does, in one interpreter with the globals that Redis gives.

Answers are the same in every run: this Lua hashes strings without a seed, so even `pairs` has one order.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

from lupa import lua51
from redis.exceptions import RedisError, ResponseError

_GLOBALS_OF_REDIS: Final = b"""
-- lupa itself needs `debug`.
for _, name in ipairs({'dofile', 'gcinfo', 'getfenv', 'io', 'loadfile', 'module', 'newproxy', 'os', 'package', 'print',
                       'python', 'require', 'setfenv'}) do
  _G[name] = nil
end
KEYS, ARGV, redis = {}, {}, {}
setmetatable(_G, {
  __newindex = function(_, name) error('a script creates the global variable ' .. tostring(name)) end,
  __index = function(_, name) error('a script reads the global variable ' .. tostring(name) .. ', which is none') end,
})
"""


class Status(bytes):
    """A reply such as OK, which a script sees as a table."""


def run_script(text: str, keys: list[bytes], arguments: list[bytes], command: Callable[..., Any]) -> Any:
    """Runs a script.

    Args:
        command: carries out one of Redis' commands; gets bytes and numbers, and returns bytes, a number, a Status, None
            or a list of those.

    Returns:
        The script's reply as redis-py gives it.

    Raises:
        ResponseError: the reply is an error.
        lua51.LuaError: the text does not parse, or the script fails.
    """
    lua = _interpreter()

    def call(*given: Any) -> Any:
        return _to_lua(command(*given))

    def protected_call(*given: Any) -> Any:
        try:
            return call(*given)
        except RedisError as failure:
            return lua.table_from({b"err": str(failure).encode()})

    variables: Any = lua.globals()
    variables[b"KEYS"], variables[b"ARGV"] = lua.table_from(keys), lua.table_from(arguments)
    variables[b"redis"] = lua.table_from({b"call": call, b"pcall": protected_call})
    return _reply(_compiled(text)())


@functools.cache
def _interpreter() -> lua51.LuaRuntime:
    lua = lua51.LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
    lua.execute(_GLOBALS_OF_REDIS)
    return lua


@functools.cache
def _compiled(text: str) -> Callable[[], Any]:
    compiled: Callable[[], Any] = _interpreter().compile(text.encode())
    return compiled


def _to_lua(value: Any) -> Any:
    match value:
        case None:
            return False
        case Status():
            return _interpreter().table_from({b"ok": bytes(value)})
        case list():
            return _interpreter().table_from([_to_lua(each) for each in value])
    return value


def _reply(value: Any) -> Any:
    if lua51.lua_type(value) == "table":
        if (status := value[b"ok"]) is not None:
            return status
        if (error := value[b"err"]) is not None:
            raise ResponseError(error.decode())
        # Redis reads a list up to the first nil, too.
        found: list[Any] = []
        while (each := value[len(found) + 1]) is not None:
            found.append(_reply(each))
        return found
    if isinstance(value, bool):
        return 1 if value else None
    return int(value) if isinstance(value, float) else value
