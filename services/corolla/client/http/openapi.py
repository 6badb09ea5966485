"""The OpenAPI document of the routes, made from the models that read requests and write replies."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from corolla.client.http import chat_replies, completion_replies, response_replies, sessions, surface, tokenization
from corolla.client.http.chat import ChatCompletionRequest
from corolla.client.http.completions import CompletionRequest
from corolla.client.http.errors import ErrorReply
from corolla.client.http.responses import ResponseRequest

_REFERENCES: Final = "#/components/schemas/{model}"
_TOO_MUCH: Final = {"400": "The request is refused.", "413": "The request is too large."}
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


class Operation:
    """What a method of HTTP does at a path.

    Args:
        body: what it reads; None: nothing.
        streams: whether the reply may be a stream of events.
        is_open: whether nobody is asked who they are.
    """

    def __init__(
        self,
        summary: str,
        reply: type[BaseModel] | None,
        body: type[BaseModel] | None = None,
        *,
        streams: bool = False,
        is_open: bool = False,
    ) -> None:
        self.summary = summary
        self.reply = reply
        self.body = body
        self.streams = streams
        self.is_open = is_open


def operations() -> Mapping[tuple[str, str], Operation]:
    """By path and method."""
    return {
        ("/v1/models", "get"): Operation("The models that the service has.", surface.ModelList),
        ("/v1/models/{model}", "get"): Operation("One of them.", surface.ModelFacts),
        ("/v1/chat/completions", "post"): Operation(
            "Answers a conversation.", chat_replies.ChatCompletion, ChatCompletionRequest, streams=True
        ),
        ("/v1/completions", "post"): Operation(
            "Completes prompts.", completion_replies.Completion, CompletionRequest, streams=True
        ),
        ("/v1/responses", "post"): Operation(
            "Answers a conversation that the service remembers.",
            response_replies.Response,
            ResponseRequest,
            streams=True,
        ),
        ("/v1/sessions", "post"): Operation("Makes a session.", sessions.SessionFacts, sessions.SessionRequest),
        ("/v1/sessions/{session_id}", "get"): Operation("Tells how a session is.", sessions.SessionFacts),
        ("/v1/sessions/{session_id}", "delete"): Operation("Ends a session.", sessions.DeletedSession),
        ("/tokenize", "post"): Operation(
            "Cuts a text or a conversation into tokens.", tokenization.Tokenized, tokenization.TokenizeRequest
        ),
        ("/detokenize", "post"): Operation(
            "Makes a text of tokens.", tokenization.Detokenized, tokenization.DetokenizeRequest
        ),
        ("/health", "get"): Operation("Whether the service takes requests.", surface.Health, is_open=True),
    }


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    described = operations()
    named, definitions = models_json_schema(_models(list(described.values())), ref_template=_REFERENCES)
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), operation in described.items():
        paths.setdefault(path, {})[method] = _described(path, method, operation, named)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Corolla", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _models(described: Sequence[Operation]) -> list[tuple[type[BaseModel], Any]]:
    found: list[tuple[type[BaseModel], Any]] = [(ErrorReply, "serialization")]
    for operation in described:
        found += [(model, "validation") for model in (operation.body,) if model is not None]
        found += [(model, "serialization") for model in (operation.reply,) if model is not None]
    return list(dict.fromkeys(found))


def _described(path: str, method: str, operation: Operation, named: Mapping[Any, Any]) -> dict[str, Any]:
    replies = {"200": {"description": "It was done.", "content": dict(_contents(operation, named))}}
    failures = {**(_TOO_MUCH if operation.body is not None else {}), **_ERRORS}
    failure = {"application/json": {"schema": named[ErrorReply, "serialization"]}}
    for status, text in {"503": _ERRORS["503"]}.items() if operation.is_open else failures.items():
        replies[status] = {"description": text, "content": failure}
    facts: dict[str, Any] = {
        "operationId": f"{method}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": operation.summary,
        "responses": replies,
        "security": [] if operation.is_open else [{"key": []}, {}],
    }
    if operation.body is not None:
        schema = named[operation.body, "validation"]
        facts["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{" in path:
        name = path.partition("{")[2].rstrip("}")
        facts["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return facts


def _contents(operation: Operation, named: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    if operation.reply is not None:
        yield "application/json", {"schema": named[operation.reply, "serialization"]}
    if operation.streams:
        yield "text/event-stream", {"schema": {"type": "string"}}
