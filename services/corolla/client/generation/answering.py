"""Answers checked requests.

Context managers hold all resources of an answer, so that finish, cancellation and failure free them in the same way.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from corolla.client.generation.answer import Delta
from corolla.client.generation.answer_factory import NextPrompt
from corolla.client.generation.completions import Completions
from corolla.client.generation.request import AnyRequest
from corolla.client.generation.turns import RecordTurn, Turns


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers requests, as turns of their sessions or without a session."""

    completions: Completions
    turns: Turns

    def answer(
        self, request: AnyRequest, next_prompt: NextPrompt, record_turn: RecordTurn
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Answers a prompt: as the next turn of the request's session, or without a session, once or several times.

        Args:
            next_prompt: makes the prompt; it is called before the request's turn comes, so that a wrong prompt fails at
                once.

        Yields:
            Pairs `(index, delta)` as they come; the last delta of each index has a finish reason.
        """
        if request.session_id:
            return self.turns.answer(request, next_prompt, record_turn)
        return self.completions.answer(request, next_prompt)
