"""`corolla generate`: completes a text."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from corolla.cli.interruption import EXIT_INTERRUPTED, interruption
from corolla.sdk.client import Client
from corolla.sdk.results import FinishReason, Usage

_NOTES = {
    FinishReason.LENGTH: "cut at its token limit",
    FinishReason.TIME_LIMIT: "cut at its time limit",
    FinishReason.CANCELLED: "cancelled",
}


def run_generate(
    client: Client, prompt: str, num_completions: int, options: dict[str, Any], *, streams: bool | None, as_json: bool
) -> int:
    """Prints the completions of a prompt. Returns the exit status.

    Args:
        prompt: the text; "-" reads it from standard input, without the newline at its end; what is not UTF-8 becomes
            U+FFFD.
        streams: whether to print chunks as they come; None: only without JSON. Chunks of several completions would mix,
            so as text they are printed whole.
    """
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", errors="replace").removesuffix("\n")
    if num_completions != 1:
        options = {**options, "n": num_completions}
    streams = not as_json if streams is None else streams
    if streams and (as_json or num_completions == 1):
        return _print_stream(client, prompt, options, as_json=as_json)
    _print_whole(client, prompt, options, as_json=as_json)
    return 0


def _print_stream(client: Client, prompt: str, options: dict[str, Any], *, as_json: bool) -> int:
    with interruption() as interrupted, client.stream(prompt, **options) as stream:
        interrupted.closes(stream)
        for chunk in stream:
            sys.stdout.write(json.dumps(dataclasses.asdict(chunk)) + "\n" if as_json else chunk.text)
            sys.stdout.flush()
    if interrupted.came:
        # `main` writes a sentence next; the newline puts it on its own line.
        sys.stdout.write("" if as_json else "\n")
        sys.stdout.flush()
        return EXIT_INTERRUPTED
    if not as_json:
        sys.stdout.write("\n")
        sys.stdout.flush()
        print_usage(stream.usage, stream.finish_reason)
    print_ignored(stream.ignored)
    return 0


def _print_whole(client: Client, prompt: str, options: dict[str, Any], *, as_json: bool) -> None:
    generation = client.generate(prompt, **options)
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(generation)) + "\n")
        return
    if len(generation.completions) == 1:
        sys.stdout.write(generation.text + "\n")
    else:
        for completion in generation.completions:
            sys.stdout.write(f"[{completion.index + 1}] {completion.text.strip()}\n")
    sys.stdout.flush()
    print_usage(generation.usage, generation.finish_reason)
    print_ignored(generation.ignored)


def usage_text(usage: Usage, finish_reason: FinishReason | None = None) -> str:
    """One line such as `24 tokens, 15.2 tokens/s, first after 0.21 s, 40 of 52 prompt tokens cached`."""
    parts = [f"{usage.completion_tokens} tokens"]
    if usage.tokens_per_s:
        parts.append(f"{usage.tokens_per_s:.1f} tokens/s")
    parts.append(f"first after {usage.time_to_first_token_s:.2f} s")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    if usage.drafted_tokens:
        parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} draft tokens accepted")
    if usage.recoveries:
        parts.append(f"{usage.recoveries} recoveries took {usage.stall_s:.2f} s")
    if usage.may_differ_from_token is not None:
        parts.append(f"may differ from token {usage.may_differ_from_token} on")
    if finish_reason in _NOTES:
        parts.append(_NOTES[finish_reason])
    return ", ".join(parts)


def print_ignored(places: Sequence[str]) -> None:
    """Writes to standard error which places of the request had no effect."""
    if places:
        sys.stderr.write(f"without effect: {', '.join(places)}\n")


def print_usage(usage: Usage | None, finish_reason: FinishReason | None = None) -> None:
    if usage is not None and sys.stderr.isatty() and sys.stdout.isatty():
        say(usage_text(usage, finish_reason))


def say(text: str) -> None:
    """Writes what is not the model's to standard error."""
    sys.stderr.write(f"\033[2m{text}\033[0m\n" if sys.stderr.isatty() else f"{text}\n")
