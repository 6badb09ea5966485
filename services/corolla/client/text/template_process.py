"""Has chat templates rendered in a process of their own, which ends where a template runs away."""

import contextlib
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, cast

from corolla.chassis.errors import InternalError, InvalidRequest, QueueFull
from corolla.client.text.template import TemplateRefusal
from corolla.client.text.template_worker import OUT_OF_MEMORY, read, write

log = logging.getLogger(__name__)

_LONGEST_S: Final = 10.0
"""A process that gives no answer for so long is ended: it was stopped, or has no processor."""


class TemplateProcess:
    """One process, begun when it is first needed and again when it has ended. Safe to use from several threads.

    Args:
        source, special_tokens: of the template; see `Template`.
        longest_wait_s: for the renderings before one's own, which have a second of a processor each.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any], *, longest_wait_s: float = 3.0) -> None:
        self._template = [source, dict(special_tokens)]
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._longest_wait_s = longest_wait_s

    @property
    def pid(self) -> int | None:
        """None while it is not needed."""
        return self._process.pid if self._process is not None else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        continues_last: bool = False,
    ) -> str:
        """As `Template.render`.

        Raises:
            TemplateRefusal: the template does not accept the conversation, or fails.
            InvalidRequest: it takes too long, or too much memory.
            QueueFull: others' renderings take too long.
            InternalError: the process ends again and again.
        """
        conversation = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "arguments": arguments,
            "continues_last": continues_last,
        }
        if not self._turn.acquire(timeout=self._longest_wait_s):
            raise QueueFull("other conversations take the model's chat template too long")
        try:
            for _ in range(2):  # once more where somebody else ended it
                process = self._begun()
                with contextlib.suppress(OSError, EOFError):
                    return _answer(process, conversation)
                status = self._ended()
                self._begun()  # so that nobody waits for it
                if status in (-signal.SIGPROF, OUT_OF_MEMORY):
                    what = "much memory" if status == OUT_OF_MEMORY else "long"
                    raise InvalidRequest("messages", f"take the model's chat template too {what}")
                log.error("the process that renders chat templates has ended", extra={"status": status})
            raise InternalError("the chat template cannot be rendered")
        finally:
            self._turn.release()

    def close(self) -> None:
        """Ends the process, and waits for that. A rendering that runs has its time."""
        with self._turn:
            self._ended()

    def _begun(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "corolla.client.text.template_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            with contextlib.suppress(OSError):  # whoever asks it notices that it has ended
                write(cast(IO[bytes], self._process.stdin), self._template)
        return self._process

    def _ended(self) -> int | None:
        """How the process ended, now at the latest; None where there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(OSError):
            cast(IO[bytes], process.stdin).close()
        cast(IO[bytes], process.stdout).close()
        try:
            return process.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _answer(process: subprocess.Popen[bytes], request: Any) -> str:
    guard = threading.Timer(_LONGEST_S, process.kill)
    guard.start()
    try:
        write(cast(IO[bytes], process.stdin), request)
        answer: dict[str, str] = read(cast(IO[bytes], process.stdout))[0]
    finally:
        guard.cancel()
    if "refusal" in answer:
        raise TemplateRefusal(answer["refusal"])
    return answer["text"]
