"""What a caller's streamer gets to see of a session."""

from typing import Any

from transformers.generation.streamers import BaseStreamer


class NewTextStreamer(BaseStreamer):
    """Leaves out of the prompt what the caller did not give in this call.

    Args:
        streamer: the caller's.
        num_omitted: leading tokens of each row.
    """

    def __init__(self, streamer: BaseStreamer, num_omitted: int) -> None:
        self._streamer: Any = streamer
        self._num_omitted = num_omitted
        self._is_prompt = True

    def put(self, value: Any) -> None:
        if self._is_prompt:
            value, self._is_prompt = value[:, self._num_omitted :], False
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()
