"""What an answer cost, in one dim line on standard error; nothing where nobody watches."""

import sys

from corolla.sdk.results import FinishReason, Usage

_NOTES = {
    FinishReason.LENGTH: "cut at its token limit",
    FinishReason.TIME_LIMIT: "cut at its time limit",
    FinishReason.CANCELLED: "cancelled",
}


def usage_text(usage: Usage, finish_reason: FinishReason | None = None) -> str:
    """For example `24 tokens, 15.2 tokens/s, first after 0.21 s, 40 of 52 prompt tokens cached`."""
    parts = [f"{usage.completion_tokens} tokens"]
    if usage.tokens_per_s:
        parts.append(f"{usage.tokens_per_s:.1f} tokens/s")
    parts.append(f"first after {usage.time_to_first_token_s:.2f} s")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    if usage.drafted_tokens:
        parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} guesses right")
    if usage.recoveries:
        parts.append(f"{usage.recoveries} recoveries took {usage.stall_s:.2f} s")
    if finish_reason in _NOTES:
        parts.append(_NOTES[finish_reason])
    return ", ".join(parts)


def print_usage(usage: Usage | None, finish_reason: FinishReason | None = None) -> None:
    if usage is None or not (sys.stderr.isatty() and sys.stdout.isatty()):
        return
    from rich.console import Console

    Console(stderr=True, highlight=False).print(usage_text(usage, finish_reason), style="dim", markup=False)
