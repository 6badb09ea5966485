"""HTTP endpoints: the checks and the metrics around the code that answers a route."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.types import Receive, Scope, Send

from corolla.chassis.calls import Authenticate, Call, Guard
from corolla.chassis.errors import CallerStalled, CorollaError, MethodNotAllowed, ResourceNotFound, ServiceStopping
from corolla.client.api.tenants import KeyHolder
from corolla.http.errors import OPENAI, Dialect
from corolla.http.exchange import Exchange, Limits
from corolla.http.metrics import HttpMetrics
from corolla.trust.origins import NO_ORIGINS, AllowedOrigins, OwnPages

Behaviour = Callable[[Exchange, Call[KeyHolder]], Awaitable[None]]
"""Reads the body of a POST and replies; other requests are without one. Raises errors of `corolla.chassis.errors`."""


UNKNOWN_PATH: Final = "unknown path"
ANY_OTHER: Final = "other"


@dataclass(frozen=True, slots=True)
class EndpointFactory:
    """Makes the endpoint of a route from its behaviours.

    Attributes:
        authenticate: finds the caller, as for gRPC.
        pages: checks which web pages may send requests; None: all, since callers need a key.
        origins: the origins whose pages may read replies of a service that asks for keys.
    """

    authenticate: Authenticate
    metrics: HttpMetrics
    limits: Limits
    pages: OwnPages | None = None
    origins: AllowedOrigins = NO_ORIGINS

    def endpoint(
        self,
        route: str,
        behaviours: Mapping[str, Behaviour],
        dialect: Dialect = OPENAI,
        *,
        is_open: bool = False,
        is_of_page: bool = False,
    ) -> "Endpoint":
        """The application for a route.

        Args:
            behaviours: the behaviours by HTTP method.
            is_open: whether callers need no key; such calls are not in the audit log.
            is_of_page: whether the route serves only the service's own page; pages of other hosts must not read it.
        """
        if "GET" in behaviours and not is_of_page:
            # The server sends no body in reply to HEAD.
            behaviours = {**behaviours, "HEAD": behaviours["GET"]}
        authenticate = None if is_open else self.authenticate
        guards = {
            method: Guard(f"{method} {route}", self.metrics, authenticate, is_audited=not is_open)
            for method in behaviours
        }
        check: Callable[[Mapping[str, str]], None] | None = None
        if self.pages is not None:
            check = self.pages.check_host if is_open else self.pages.check_reader if is_of_page else self.pages.check
        # Strangers choose the names of methods, so all others of a route are counted as one.
        others = Guard(f"{ANY_OTHER} {route}", self.metrics, None, is_audited=False)
        origins = NO_ORIGINS if is_of_page else self._readers
        return Endpoint(self, behaviours, guards, others, check, origins, dialect)

    @property
    def not_found(self) -> "Endpoint":
        """The application for unknown paths."""
        unknown = Guard(UNKNOWN_PATH, self.metrics, None, is_audited=False)
        return Endpoint(self, {}, {}, unknown, None, self._readers, OPENAI)

    @property
    def _readers(self) -> AllowedOrigins:
        return self.origins if self.pages is None else self.pages.origins


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An ASGI application for one route.

    Attributes:
        check: checks the headers of a request. It raises InvalidRequest.
    """

    made_by: EndpointFactory
    behaviours: Mapping[str, Behaviour]
    guards: Mapping[str, Guard]
    others: Guard
    check: Callable[[Mapping[str, str]], None] | None
    origins: AllowedOrigins
    dialect: Dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self.made_by.limits
        exchange = Exchange(scope, receive, send, limits, self.made_by.metrics, self.dialect)
        exchange.more_headers = self.origins.headers(exchange.headers)
        behaviour = self.behaviours.get(scope["method"], self._refuse)
        guard = self.guards.get(scope["method"], self.others)
        call = guard.begin(exchange)
        try:
            if self.check is not None and guard is not self.others:
                self.check(exchange.headers)
            await guard.let_in(call)
            with limits.held.hold(call) as exchange.held:
                call.held = exchange.held
                if exchange.request.method in self.behaviours.keys() - {"POST"}:
                    await exchange.without_body()
                await behaviour(exchange, call)
        except BaseException as failure:
            if not exchange.is_left and isinstance(failure, asyncio.CancelledError):
                call.failure = ServiceStopping("the service is stopping; try again with another one")
            await self._tell(exchange, guard, guard.failed(call, failure))
            if not isinstance(failure, Exception | asyncio.CancelledError):
                raise
            return
        finally:
            exchange.end_watch()
        guard.done(call)

    async def _tell(self, exchange: Exchange, guard: Guard, error: CorollaError | None) -> None:
        if isinstance(error, CallerStalled):
            guard.stalled()
            exchange.abort()
        elif error is not None:
            allowed = {"allow": self._allowed} if isinstance(error, MethodNotAllowed) else {}
            try:
                await exchange.reply_error(error, **allowed)
            except CallerStalled:
                exchange.abort()
            except asyncio.CancelledError:
                if not exchange.is_left:
                    raise

    @property
    def _allowed(self) -> str:
        return ", ".join(sorted(self.behaviours))

    async def _refuse(self, exchange: Exchange, call: object) -> None:
        """Answers requests with other methods."""
        if not self.behaviours:
            raise ResourceNotFound("this path does not exist")
        if exchange.request.method != "OPTIONS" or "access-control-allow-origin" not in exchange.more_headers:
            raise MethodNotAllowed(f"this path accepts only {self._allowed}")
        # A browser asks without a key whether a page may send a request with one.
        preflight = self.origins.preflight_headers(exchange.headers, self._allowed)
        await exchange.reply(b"", status=204, **preflight)
