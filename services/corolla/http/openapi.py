"""The OpenAPI document and the routes, both made from the operations."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from corolla.http.endpoints import EndpointFactory
from corolla.http.exchange import Exchange
from corolla.http.operations import Operation, operations_of
from corolla.http.page import pages
from corolla.http.routes import HttpRoutes

_VERSION: Final = "/v1"
_EVENTS: Final = {"description": "Server-sent events, the data of each of which is JSON."}
"""Readers of OpenAPI 3.1 do not agree whether the schema of a stream is that of its text, or of each event."""
_REFERENCES: Final = "#/components/schemas/{model}"
_SCHEMES: Final = {
    "key": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_REFUSED: Final = {"400": "The request is refused."}
_TOO_LARGE: Final = {"413": "The request is too large."}
_ERRORS: Final = {
    "401": "The key or token is not known.",
    "403": "The key or token is for other calls.",
    "404": "There is no such model, session or response.",
    "409": "Another turn of the session is running.",
    "429": "The tenant has used up a quota, or the service is full; Retry-After says when to try again.",
    "500": "A fault of the service.",
    "503": "Blocks have no server, or the service stops.",
    "504": "The request did not come in time.",
}


_ALL: Final = operations_of(HttpRoutes)
OPERATIONS: Final = tuple(each for each in _ALL if not each.is_watch)
"""The operations that exist without the page, too, except the one for the document itself."""


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    named, definitions = models_json_schema(_models(operations), ref_template=_REFERENCES)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, named)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Corolla", "version": "1"},
        "paths": paths,
        "components": {"schemas": definitions["$defs"], "securitySchemes": _SCHEMES},
    }


def _models(operations: Sequence[Operation]) -> list[tuple[type[BaseModel], Any]]:
    found: list[tuple[type[BaseModel], Any]] = []
    for operation in operations:
        found += [(operation.reply, "serialization"), (operation.dialect.error_reply, "serialization")]
        if operation.body is not None:
            found.append((operation.body, "validation"))
    return list(dict.fromkeys(found))


def _described(operation: Operation, named: Mapping[Any, Any]) -> dict[str, Any]:
    reply = named[operation.reply, "serialization"]
    content: dict[str, Any] = {} if operation.is_watch else {"application/json": {"schema": reply}}
    if operation.is_watch:
        content["text/event-stream"] = {"schema": _EVENTS, "x-event-data": reply}
    elif operation.streams:
        content["text/event-stream"] = {"schema": _EVENTS}
    replies = {"200": {"description": "It was done.", "content": content}}
    failures = {
        **({} if operation.body is None and operation.query is None else _REFUSED),
        **({} if operation.body is None else _TOO_LARGE),
        **_ERRORS,
    }
    failure = {"application/json": {"schema": named[operation.dialect.error_reply, "serialization"]}}
    for status, text in {"503": _ERRORS["503"]}.items() if operation.is_open else failures.items():
        replies[status] = {"description": text, "content": failure}
    facts: dict[str, Any] = {
        "operationId": operation.does.__name__,
        "summary": operation.does.__doc__,
        "responses": replies,
        "security": [] if operation.is_open else [*({name: []} for name in _SCHEMES), {}],
    }
    if operation.body is not None:
        body = {"application/json": {"schema": named[operation.body, "validation"]}}
        facts["requestBody"] = {"required": operation.needs_body, "content": body}
    given = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in operation.names]
    if operation.query is not None:
        known = operation.query.model_json_schema()["properties"]
        given += [{"name": name, "in": "query", "required": False, "schema": known[name]} for name in known]
    return facts | ({"parameters": given} if given else {})


def router(endpoints: EndpointFactory, handlers: HttpRoutes, *, has_page: bool) -> ASGIApp:
    """The application that serves all operations, also where `/v1` is missing or doubled, or a slash ends the path."""
    operations = _ALL if has_page else OPERATIONS
    described = json.dumps(document(operations)).encode()

    async def openapi(exchange: Exchange, call: object) -> None:
        await exchange.reply(described)

    served = [Route("/openapi.json", endpoints.endpoint("/openapi.json", {"GET": openapi}, is_open=True))]
    for path, group in groupby(operations, lambda each: each.path):
        found = list(group)
        behaviours = {each.method: each.behaviour(handlers) for each in found}
        first = found[0]
        endpoint = endpoints.endpoint(path, behaviours, first.dialect, is_open=first.is_open, is_of_page=first.is_watch)
        # A model's name may be an id of the Hugging Face Hub, which has a slash.
        pattern = path.replace("{model}", "{model:path}")
        # Many clients leave /v1 out of their base address.
        served += [Route(each, endpoint) for each in dict.fromkeys((pattern, pattern.removeprefix(_VERSION)))]
    for path, show in pages() if has_page else ():
        served.append(Route(path, endpoints.endpoint("/page", {"GET": show}, is_open=True)))
    routed = Router(served, redirect_slashes=False, default=endpoints.not_found)

    async def with_usual_path(scope: Scope, receive: Receive, send: Send) -> None:
        # Anthropic's clients put /v1 behind a base address that has it already, as OpenAI's clients need it.
        path = scope["path"].removeprefix(_VERSION if scope["path"].startswith(_VERSION * 2) else "")
        await routed({**scope, "path": path.rstrip("/") or "/"}, receive, send)

    return with_usual_path
