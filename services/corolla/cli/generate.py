"""`corolla generate`."""

import dataclasses
import json
import sys
from typing import Any

from corolla.cli.interruption import EXIT_INTERRUPTED, interruption
from corolla.cli.usage_line import print_usage
from corolla.sdk.client import Client


def run_generate(
    client: Client, prompt: str, num_completions: int, options: dict[str, Any], *, streams: bool | None, as_json: bool
) -> int:
    """Prints the completion, or several of them.

    Args:
        prompt: "-" is read from standard input, without the newline at its end.
        streams: None streams one completion of text.
    """
    if prompt == "-":
        prompt = read_stdin().removesuffix("\n")
    if num_completions != 1:
        options = {**options, "n": num_completions}
    if streams is None:
        streams = num_completions == 1 and not as_json
    if streams:
        return _print_stream(client, prompt, options, as_json=as_json, with_index=num_completions != 1)
    _print_whole(client, prompt, options, as_json=as_json)
    return 0


def read_stdin() -> str:
    """Bytes that are no text come out as U+FFFD."""
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


def _print_stream(client: Client, prompt: str, options: dict[str, Any], *, as_json: bool, with_index: bool) -> int:
    with interruption() as told, client.stream(prompt, **options) as stream:
        told.closes(stream)
        for chunk in stream:
            if as_json:
                sys.stdout.write(json.dumps(dataclasses.asdict(chunk)) + "\n")
            elif with_index:
                # Several completions grow at once; each is printed when it is whole.
                if chunk.finish_reason is not None:
                    _print_numbered(chunk.index, stream.completion(chunk.index).text)
            else:
                sys.stdout.write(chunk.text)
            sys.stdout.flush()
    if told.came:
        return EXIT_INTERRUPTED
    if not as_json:
        if not with_index:
            sys.stdout.write("\n")
            sys.stdout.flush()
        print_usage(stream.usage, stream.finish_reason)
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
            _print_numbered(completion.index, completion.text)
    sys.stdout.flush()
    print_usage(generation.usage, generation.finish_reason)


def _print_numbered(index: int, text: str) -> None:
    sys.stdout.write(f"[{index + 1}] {text.strip()}\n")
