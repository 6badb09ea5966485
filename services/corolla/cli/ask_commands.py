"""Commands that ask a running stack: generate, chat, status, bench."""

from typing import Annotated

import typer

from corolla.cli import ask_options as ask

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@ask.takes_options
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to complete; - reads it from standard input.")],
    place: ask.Place,
    answer: ask.Completion,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print the answer as it comes, or at its end.")
    ] = None,
    json: Json = False,
    n: Annotated[int, typer.Option("-n", help="Independent completions of the prompt.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of the tokens, and of so many likeliest ones.")
    ] = None,
) -> int:
    """Completes a text.

    The model goes on where the text ends; `corolla chat` answers questions.
    """
    from corolla.cli.generate import run_generate
    from corolla.sdk.client import Client

    if logprobs is not None and not json:
        raise typer.BadParameter("--logprobs needs --json, since text shows none")
    options = ask.given(model=place.model, logprobs=logprobs, **answer.options)
    with place.client(Client) as client:
        return run_generate(client, prompt, n, options, streams=stream, as_json=json)


@ask.takes_options
def chat(
    place: ask.Place,
    answer: ask.ChatAnswer,
    system: Annotated[str | None, typer.Option(help="System message: how the model is to answer.")] = None,
    session: Annotated[str | None, typer.Option(help="Go on with an existing session.", show_default=False)] = None,
    json: Json = False,
) -> int:
    """Talks with the model, which remembers the conversation.

    Ctrl-C stops an answer, Ctrl-D or /exit leaves, /reset starts anew. Without a terminal each line of standard
    input is a turn. Where the model calls tools, the next lines are their results, one for each call.
    """
    from corolla.cli.chat import run_chat
    from corolla.sdk.client import Client

    options = ask.given(model=place.model, **answer.options)
    with place.client(Client) as client:
        return run_chat(client, system, session, options, as_json=json)


def status(
    router: Annotated[
        str, typer.Option("--router", "-r", envvar="COROLLA_ROUTER", metavar="HOST:PORT", help="The router.")
    ] = "127.0.0.1:50050",
    model: Annotated[str, typer.Option("--model", "-m", help="Model, if the service has several.")] = "",
    json: Json = False,
) -> int:
    """Shows which server holds which blocks. Exit status 1 when a block has no server."""
    from corolla.cli.placement_table import run_status

    return run_status(router, model, as_json=json)


@ask.takes_options
def bench(
    place: ask.Place,
    load: ask.BenchLoad,
    first_token_slo: Annotated[float, typer.Option(help="Good answers begin within so many seconds.")] = 2.0,
    inter_token_slo: Annotated[float, typer.Option(help="Good answers have no longer pause between tokens.")] = 0.5,
    json: Json = False,
) -> int:
    """Loads a service, and measures its answers.

    Requests are sent when they are due, whether or not the service keeps up (open loop). Ctrl-C prints what was
    measured so far.
    """
    from corolla.cli.bench import run_bench
    from corolla.cli.bench_load import ServiceLevel

    return run_bench(place, load, ServiceLevel(first_token_slo, inter_token_slo), as_json=json)
