"""Has chat templates rendered in a process of their own, which ends where a template runs away."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from corolla.chassis.errors import InvalidRequest
from corolla.client.text.template import TemplateRefusal
from corolla.client.text.worker_process import RanAway, WorkerProcess


class TemplateProcess:
    """Safe to use from several threads.

    Args:
        source, special_tokens: of the template; see `Template`.
        longest_wait_s: for the renderings before one's own, which have a second of a processor each.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any], *, longest_wait_s: float = 10.0) -> None:
        self._worker = WorkerProcess(
            "corolla.client.text.template",
            [source, dict(special_tokens)],
            "renders chat templates",
            longest_wait_s=longest_wait_s,
        )

    @property
    def pid(self) -> int | None:
        """Of the process; None while it is not needed."""
        return self._worker.pid

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """As `Template.render`, with the same arguments.

        Raises:
            TemplateRefusal: the template does not accept the conversation, or fails.
            InvalidRequest: it takes too long, or too much memory.
            QueueFull: others' renderings take too long.
            InternalError: the process ends again and again.
        """
        try:
            answer = cast(dict[str, str], self._worker.ask({"messages": list(messages), **options}))
        except RanAway as error:
            raise InvalidRequest("messages", f"take the model's chat template {error}") from None
        if "refusal" in answer:
            raise TemplateRefusal(answer["refusal"])
        return answer["text"]

    def close(self) -> None:
        """Ends the process, and waits for that. A rendering that runs has its time."""
        self._worker.close()
