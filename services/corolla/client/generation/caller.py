"""Who asks for an answer, and how long they wait for it."""

import asyncio
import math
from dataclasses import dataclass

from corolla.client.generation.usage import Usage


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what the request takes.

    Attributes:
        num_bytes: of the request's message.
        until_s: when the caller no longer waits, by the event loop's clock.
    """

    tenant: str
    num_bytes: int
    usage: Usage
    until_s: float = math.inf

    def waits_until_s(self, time_limit_s: float | None) -> float:
        """When nobody waits any more for an answer that begins now."""
        if time_limit_s is None:
            return self.until_s
        return min(self.until_s, asyncio.get_running_loop().time() + time_limit_s)
