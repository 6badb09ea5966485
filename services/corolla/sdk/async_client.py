"""The Python client for asyncio."""

from typing import Unpack

from corolla.sdk.async_calls import AsyncCalls
from corolla.sdk.async_sessions import AsyncChat, AsyncSession
from corolla.sdk.requests import ChatOptions


class AsyncClient(AsyncCalls):
    """Talks to a Corolla client service. Made and used in one event loop.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for chunk in client.stream("The capital of France is", max_tokens=8):
                print(chunk.text, end="")

    Failed calls raise a class of `corolla.errors`, with `reason`, `message` and, where waiting helps, `retry_after_s`.

    Args:
        address: host:port of the client service, or any gRPC target.
        api_key: key or token, where the service wants one. A function is asked for that of now at each call, so that
            tokens that expire can be renewed; it keeps them itself for as long as they are good.
        timeout: seconds that a call may take unless it is given its own; None is without limit.
        credentials: for TLS, for example `grpc.ssl_channel_credentials()`; None is plain text.
    """

    def chat(
        self, *, system: str | None = None, session: str | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncChat:
        """A conversation that the service keeps.

        Args:
            system: system message that goes before the first turn.
            session: id of an existing session to go on with; it is not deleted at the end.
            options: of every turn; a turn's own options go before them.
        """
        return AsyncChat(self, system=system, session_id=session, options=options)

    def session(self, session_id: str | None = None, *, model: str = "", adapter: str = "") -> AsyncSession:
        """A session for `generate` and `stream`: a new one, deleted at the end, or an existing one by its id.

        Args:
            adapter: with which all turns of a new one are computed.
        """
        return AsyncSession(self, session_id=session_id, model=model, adapter=adapter)
