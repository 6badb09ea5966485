"""Renders chat templates in a process of its own, which is ended if a template takes too long or too much memory."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from corolla.chassis.errors import InvalidRequest
from corolla.client.text.template import TemplateRefusal
from corolla.client.text.worker_process import WorkerProcess, WorkLimitExceeded


class TemplateProcess:
    """Renders one template in a process of its own. Safe to use from several threads.

    Args:
        source, special_tokens: see `Template`.
        longest_wait_s: seconds to wait for earlier renderings, each of which may take a second of processor time.
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
        """The id of the process; None before the first request starts it."""
        return self._worker.pid

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Renders a conversation; the arguments are those of `Template.render`.

        Raises:
            TemplateRefusal: the template does not accept the conversation, or fails.
            InvalidRequest: the rendering takes too long, or too much memory.
            QueueFull: other callers' renderings take too long.
            InternalError: the process ends again and again.
        """
        try:
            answer = cast(dict[str, str], self._worker.ask({"messages": list(messages), **options}))
        except WorkLimitExceeded as error:
            raise InvalidRequest("messages", f"take the model's chat template {error}") from None
        if "refusal" in answer:
            raise TemplateRefusal(answer["refusal"])
        return answer["text"]

    def close(self) -> None:
        """Waits for a running rendering, then ends the process."""
        self._worker.close()
