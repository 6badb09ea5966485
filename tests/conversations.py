"""Messages of conversations in one line."""

from collections.abc import Sequence

from corolla.v1.common_pb2 import ChatMessage, ToolCall


def message(
    role: str,
    content: str | Sequence[str] = "",
    reasoning: str = "",
    tool_calls: Sequence[ToolCall] = (),
    tool_call_id: str = "",
    name: str = "",
) -> ChatMessage:
    """A message whose content is a text, or several parts of text."""
    is_text = isinstance(content, str)
    return ChatMessage(
        role=role, content=str(content) if is_text else "", content_parts=() if is_text else content,
        reasoning=reasoning, tool_calls=tool_calls, tool_call_id=tool_call_id, name=name,
    )  # fmt: skip
