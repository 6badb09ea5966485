"""The paths of HTTP."""

import json
from functools import partial
from itertools import groupby

from starlette.routing import Route, Router

from corolla.client.http.door import Door
from corolla.client.http.exchange import Exchange
from corolla.client.http.openapi import OPERATIONS, document
from corolla.client.http.surface import Surface


def router(door: Door, surface: Surface) -> Router:
    """The application that serves all of them."""
    described = json.dumps(document()).encode()

    async def openapi(exchange: Exchange, call: object) -> None:
        await exchange.without_body()
        await exchange.reply(described)

    routes = [Route("/openapi.json", door.endpoint("/openapi.json", {"GET": openapi}, is_open=True))]
    for path, found in groupby(OPERATIONS, lambda each: each.path):
        operations = list(found)
        behaviours = {each.method: partial(each.does, surface) for each in operations}
        endpoint = door.endpoint(path, behaviours, is_open=operations[0].is_open)
        # Names of models of a hub have slashes.
        routes.append(Route(path.replace("{model}", "{model:path}"), endpoint))
    return Router(routes, redirect_slashes=False, default=door.not_found)
