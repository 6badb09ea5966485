"""The paths of HTTP."""

import json
from collections.abc import Callable

from starlette.routing import Route, Router

from corolla.chassis.errors import ServiceUnavailable
from corolla.client.http.door import Behaviour, Door
from corolla.client.http.exchange import Exchange
from corolla.client.http.openapi import document
from corolla.client.http.surface import PART_OF_MODEL, PART_OF_SESSION, Health, Surface


def router(door: Door, surface: Surface, is_serving: Callable[[], bool]) -> Router:
    """The application that serves all of them."""

    async def health(exchange: Exchange, call: object) -> None:
        """Whether the service takes requests."""
        await exchange.without_body()
        if not is_serving():
            raise ServiceUnavailable("the service does not take requests now")
        await exchange.reply(Health().model_dump_json().encode())

    described = json.dumps(document()).encode()

    async def openapi(exchange: Exchange, call: object) -> None:
        """What can be asked."""
        await exchange.without_body()
        await exchange.reply(described)

    asked: dict[str, dict[str, Behaviour]] = {
        "/v1/models": {"GET": surface.list_models},
        f"/v1/models/{{{PART_OF_MODEL}:path}}": {"GET": surface.get_model},
        "/v1/chat/completions": {"POST": surface.chat},
        "/v1/completions": {"POST": surface.complete},
        "/v1/responses": {"POST": surface.respond},
        "/v1/sessions": {"POST": surface.create_session},
        f"/v1/sessions/{{{PART_OF_SESSION}}}": {"GET": surface.get_session, "DELETE": surface.delete_session},
        "/tokenize": {"POST": surface.tokenize},
        "/detokenize": {"POST": surface.detokenize},
    }
    routes = [Route(path, door.endpoint(path, behaviours)) for path, behaviours in asked.items()]
    for path, behaviour in {"/health": health, "/openapi.json": openapi}.items():
        routes.append(Route(path, door.endpoint(path, {"GET": behaviour}, is_open=True)))
    return Router(routes, redirect_slashes=False, default=door.not_found)
