"""A chain of processes on this machine whose links are as slow as one says."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from benchmarks.chain import Chain
from corolla.local.options import LOOPBACK
from corolla.local.supervisor import StackEvent
from corolla.sdk.results import Generation

# Block servers say that they live here, where only the relay does; so every byte to and from them passes through it.
_DISTANT = "127.0.0.2"


class DistantChain(Chain):
    """A chain whose block servers are behind a relay.

    Args:
        model: checkpoint folder, GGUF file, hub id or demo.
        spans: `"start:end"`, one block server for each.
        settings: of all its processes, as environment variables.
        logs: the folder for the log files of all processes; None: they are not kept.
    """

    def __init__(
        self, model: Path | str, spans: Sequence[str], settings: Mapping[str, str], logs: Path | None = None
    ) -> None:
        environment = {"COROLLA_ADVERTISED_HOST": _DISTANT, **settings}
        self._relay: subprocess.Popen[str] | None = None
        super().__init__(model, blocks=",".join(spans), environment=environment, logs=logs)

    def _note(self, event: StackEvent) -> None:
        super()._note(event)
        # A server is ready once another one reaches it, so the relay begins while they start.
        if event.source == "client" and self._relay is None:
            links = [f"{server.address.replace(LOOPBACK, _DISTANT)}={server.address}" for server in self.servers]
            relay = self._relay = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.relay", *links],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._exits.callback(relay.terminate)
            self._relay_input, self._relay_output = cast(IO[str], relay.stdin), cast(IO[str], relay.stdout)
            self._relay_output.readline()

    def set_delay(self, delay_ms: float) -> None:
        """Holds back what crosses a link for so long, from now on."""
        self._relay_input.write(f"{delay_ms}\n")
        self._relay_input.flush()
        self._relay_output.readline()

    def generate(self, prompt: Any, **options: Any) -> Generation:
        """One answer. The options are those of the client's `generate`."""
        answer: Generation = self.run(self.client.generate(prompt, **options))
        return answer
