"""The Python client for ordinary, blocking code."""

# Written by tools/sync_client.py from async_client.py; change that, then run `make sync-client`.

from typing import Unpack

from corolla.sdk.calls import Calls
from corolla.sdk.requests import ChatOptions
from corolla.sdk.sessions import Chat, Session


class Client(Calls):
    """Talks to a Corolla client service. Safe to share between threads.

        with Client("127.0.0.1:50051") as client:
            for chunk in client.stream("The capital of France is", max_tokens=8):
                print(chunk.text, end="")

    Failed calls raise a class of `corolla.errors`, with `reason`, `message` and, where waiting helps, `retry_after_s`.

    Args:
        address: host:port of the client service, or any gRPC target.
        api_key: key or token, where the service wants one. A function is asked for that of now at each call, so that
            tokens that expire can be renewed; it keeps them itself for as long as they are good.
        timeout: seconds that a call may take unless it is given its own; None is without limit.
        credentials: for TLS, for example `grpc.ssl_channel_credentials()`; None is plain text.
    """

    def chat(self, *, system: str | None = None, session: str | None = None, **options: Unpack[ChatOptions]) -> Chat:
        """A conversation that the service keeps.

        Args:
            system: system message that goes before the first turn.
            session: id of an existing session to go on with; it is not deleted at the end.
            options: of every turn; a turn's own options go before them.
        """
        return Chat(self, system=system, session_id=session, options=options)

    def session(self, session_id: str | None = None, *, model: str = "", adapter: str = "") -> Session:
        """A session for `generate` and `stream`: a new one, deleted at the end, or an existing one by its id.

        Args:
            adapter: with which all turns of a new one are computed.
        """
        return Session(self, session_id=session_id, model=model, adapter=adapter)
