"""The paths of HTTP."""

import json
from functools import partial
from itertools import groupby

from starlette.routing import Route, Router

from corolla.client.http.door import Door
from corolla.client.http.exchange import Exchange
from corolla.client.http.openapi import OF_THE_PAGE, OPERATIONS, document
from corolla.client.http.page import pages
from corolla.client.http.surface import Surface


def router(door: Door, surface: Surface, *, has_page: bool) -> Router:
    """The application that serves all of them."""
    operations = (*OPERATIONS, *(OF_THE_PAGE if has_page else ()))
    described = json.dumps(document(operations)).encode()

    async def openapi(exchange: Exchange, call: object) -> None:
        await exchange.without_body()
        await exchange.reply(described)

    routes = [Route("/openapi.json", door.endpoint("/openapi.json", {"GET": openapi}, is_open=True))]
    for path, group in groupby(operations, lambda each: each.path):
        found = list(group)
        behaviours = {each.method: partial(each.does, surface) for each in found}
        endpoint = door.endpoint(path, behaviours, is_open=found[0].is_open, is_of_page=found[0].is_watch)
        # Names of models of a hub have slashes.
        routes.append(Route(path.replace("{model}", "{model:path}"), endpoint))
    for path, show in pages() if has_page else ():
        routes.append(Route(path, door.endpoint("/page", {"GET": show}, is_open=True)))
    return Router(routes, redirect_slashes=False, default=door.not_found)
