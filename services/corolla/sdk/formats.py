"""Writes the form of answers that a caller asks for into a request."""

import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from corolla.chassis.errors import InvalidRequest
from corolla.v1 import generation_pb2 as pb


@runtime_checkable
class SchemaSource(Protocol):
    """An object that returns its JSON Schema, such as a pydantic model class."""

    def model_json_schema(self) -> Mapping[str, Any]: ...


ResponseFormat = Mapping[str, Any] | SchemaSource
"""The form of an answer: `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {"schema": ...}}`, both
as in the OpenAI API; or `{"type": "regex", "regex": ...}`, `{"type": "choice", "choice": [...]}`, `{"type": "lark",
"lark": ...}`; or a pydantic model class. `{"type": "text"}` is any text."""


def set_format(message: pb.ResponseFormat, given: object) -> None:
    """Writes a `ResponseFormat` into a request. Raises InvalidRequest if `given` is something else."""
    if not isinstance(given, Mapping):
        if not isinstance(given, SchemaSource):
            raise InvalidRequest("response_format", "must be a mapping with a 'type', or a class of pydantic's models")
        given = {"type": "json_schema", "json_schema": {"schema": given.model_json_schema()}}
    form: Mapping[str, Any] = given
    kind = form.get("type")
    try:
        match kind:
            case "text":
                pass
            case "json_object":
                message.json_object.SetInParent()
            case "json_schema":
                message.json_schema = json.dumps(form["json_schema"]["schema"])
                message.strict = bool(form["json_schema"].get("strict"))
            case "choice":
                message.choice.texts.extend(form["choice"])
                message.choice.SetInParent()
            case "regex" | "lark":
                setattr(message, kind, form[kind])
            case _:
                raise InvalidRequest("response_format", "'type' is unknown")
    except (KeyError, TypeError, ValueError):
        raise InvalidRequest("response_format", f"the description of {kind} is missing or not valid") from None
