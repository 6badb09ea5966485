"""`/v1/sessions`: conversations that outlive a request, for `session_id`."""

from typing import Literal

from pydantic import BaseModel, Field

from corolla.client.http.fields import Fields
from corolla.v1 import generation_pb2 as pb


class SessionRequest(Fields):
    """A session to be made."""

    model: str = Field("", max_length=512, description="Empty: the only model that the service has.")


class SessionFacts(BaseModel):
    """A session. Whoever created it owns it; to others it does not exist."""

    id: str
    object: Literal["session"] = "session"
    model: str
    num_tokens: int = Field(description="Tokens of prompts and answers so far.")
    num_turns: int
    busy: bool = Field(description="Whether a turn is running.")
    expires_in_seconds: float = Field(description="Seconds until it expires when it stays idle.")


class DeletedSession(BaseModel):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


def facts_of(session: pb.Session) -> SessionFacts:
    return SessionFacts(
        id=session.session_id,
        model=session.model,
        num_tokens=session.num_tokens,
        num_turns=session.num_turns,
        busy=session.busy,
        expires_in_seconds=session.expires_in_seconds,
    )
