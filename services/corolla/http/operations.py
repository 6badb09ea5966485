"""The operations of HTTP: what a method of `HttpRoutes` answers, and what it is given of a request."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel

from corolla.chassis.calls import Call
from corolla.client.api.tenants import KeyHolder
from corolla.http.endpoints import Behaviour
from corolla.http.errors import OPENAI, Dialect
from corolla.http.exchange import Exchange

Does = TypeVar("Does", bound=Callable[..., Awaitable["BaseModel | AsyncGenerator[str, None] | None"]])
"""A method that returns the reply, or its pieces; None if it has sent it."""

_OPERATION = "http_operation"


@dataclass(frozen=True)
class Operation:
    """One HTTP method at one path.

    Attributes:
        method, path: as in the document. One part of the path may be a parameter, and `{model}` may hold slashes.
        does: the method of HttpRoutes; its docstring is the summary in the document. By the names of its arguments it
            gets the `exchange`, the `call`, the parameter of the path, the `body` and the `query` behind the path.
        reply: the body of a reply that is not streamed; for a watch, the data of each event.
        needs_body: whether a request must have its body.
        streams: whether the reply may be a stream of events.
        is_watch: whether the reply is a stream of events for as long as the caller stays, for the page only.
        is_open: whether callers need no key.
        dialect: what errors and streams look like.
    """

    method: str
    path: str
    does: Callable[..., Awaitable[BaseModel | AsyncGenerator[str, None] | None]]
    reply: type[BaseModel]
    needs_body: bool = True
    streams: bool = False
    is_watch: bool = False
    is_open: bool = False
    dialect: Dialect = OPENAI

    @property
    def names(self) -> list[str]:
        """The names of the path's parameters."""
        return re.findall(r"{(\w+)}", self.path)

    @cached_property
    def _takes(self) -> Mapping[str, Any]:
        return get_type_hints(self.does)

    @property
    def body(self) -> Any:
        """The class of the request's body; None: it has none."""
        return self._takes.get("body")

    @property
    def query(self) -> Any:
        """The class of the parameters behind the path; None: it has none."""
        return self._takes.get("query")

    def behaviour(self, routes: object) -> Behaviour:
        """Reads a request, and sends what the method of `routes` returns."""

        async def behave(exchange: Exchange, call: Call[KeyHolder]) -> None:
            given = {"exchange": exchange, "call": call, **exchange.request.path_params}
            if self.body is not None:
                given["body"] = await exchange.read(self.body, may_be_empty=not self.needs_body)
            if self.query is not None:
                given["query"] = exchange.query(self.query)
            reply = await self.does(routes, **{name: each for name, each in given.items() if name in self._takes})
            if isinstance(reply, BaseModel):
                await exchange.reply(reply.model_dump_json().encode())
            elif reply is not None:
                await exchange.reply_in_pieces(reply)

        return behave


def operation(method: str, path: str, reply: type[BaseModel], **facts: Any) -> Callable[[Does], Does]:
    """Makes a method of HttpRoutes an operation; `facts` are further attributes of `Operation`."""

    def mark(does: Does) -> Does:
        setattr(does, _OPERATION, Operation(method, path, does, reply, **facts))
        return does

    return mark


def operations_of(kind: type[object]) -> tuple[Operation, ...]:
    """The operations of a class, in the order of its methods."""
    return tuple(getattr(each, _OPERATION) for each in vars(kind).values() if hasattr(each, _OPERATION))
