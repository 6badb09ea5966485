"""Writes the tools that the model may call into a request."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from corolla.chassis.errors import InvalidRequest
from corolla.sdk.fields import set_field
from corolla.v1 import generation_pb2 as pb

AnyTool = Mapping[str, Any] | type[Any]
"""A tool as in the OpenAI API, `{"type": "function", "function": {"name": ..., "description": ..., "parameters":
...}}`, or only the inner mapping; or a dataclass or pydantic model class, whose fields are the arguments."""

AnyToolChoice = str | AnyTool
""""none", "auto" or "required"; or the tool that must be called."""

_MODES: Final = {
    "none": pb.ToolChoice.MODE_NONE,
    "auto": pb.ToolChoice.MODE_AUTO,
    "required": pb.ToolChoice.MODE_REQUIRED,
}
_KEYS: Final = frozenset({"name", "description", "parameters", "strict"})


def add_tools(request: pb.ChatRequest | pb.Conversation, tools: Sequence[AnyTool]) -> None:
    """Adds tools to a request. Raises InvalidRequest if one of them is not a tool."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequest("tools", "must be a sequence of tools")
    for position, tool in enumerate(tools):
        place = f"tools[{position}]"
        function = _function(tool, place)
        if unknown := sorted(map(str, function.keys() - _KEYS)):
            raise InvalidRequest(place, f"{unknown[0]!r} is not one of {', '.join(sorted(_KEYS))}")
        added = request.tools.add()
        for key in ("name", "description", "strict"):
            set_field(added, key, function.get(key), f"{place}.{key}")
        if (parameters := function.get("parameters")) is not None:
            added.parameters = _json(parameters, f"{place}.parameters")


def set_tool_choice(choice: pb.ToolChoice, given: AnyToolChoice) -> None:
    """Writes a choice of tools into a request. Raises InvalidRequest if `given` is not a choice."""
    if isinstance(given, str):
        if given not in _MODES:
            raise InvalidRequest("tool_choice", f"must be one of {', '.join(_MODES)}, or a tool")
        choice.mode = _MODES[given]
        return
    choice.mode = pb.ToolChoice.MODE_NAMED
    set_field(choice, "name", _function(given, "tool_choice").get("name"), "tool_choice")


def _function(tool: object, place: str) -> Mapping[str, Any]:
    if isinstance(tool, type):
        return _function_of_class(tool, place)
    if isinstance(tool, Mapping):
        inner = tool.get("function", {key: value for key, value in tool.items() if key != "type"})
        if tool.get("type", "function") == "function" and isinstance(inner, Mapping):
            return inner
    raise InvalidRequest(place, "must be a mapping of type 'function', or a class of fields")


def _function_of_class(tool: type[Any], place: str) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(tool):
        from pydantic import TypeAdapter

        schema = TypeAdapter(tool).json_schema()
        # A dataclass without a docstring gets its signature as docstring.
        description = "" if (tool.__doc__ or "").startswith(f"{tool.__name__}(") else tool.__doc__
    elif hasattr(tool, "model_json_schema"):
        schema, description = tool.model_json_schema(), tool.__doc__
    else:
        raise InvalidRequest(place, "a class must be one of pydantic's models, or of dataclasses")
    parameters = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {"name": tool.__name__, "description": (description or "").strip(), "parameters": parameters}


def _json(value: object, place: str) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        raise InvalidRequest(place, "must be JSON") from None
