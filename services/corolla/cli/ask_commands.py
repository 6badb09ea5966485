"""Commands that ask a running stack: generate, chat, status, bench."""

from typing import Annotated

import typer

from corolla.cli import ask_options as ask

_PANEL = "Ask a model"
DEFAULT_ROUTER = "127.0.0.1:50050"

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=_PANEL)(generate)
    app.command(rich_help_panel=_PANEL)(chat)
    app.command(rich_help_panel=_PANEL)(status)
    app.command(rich_help_panel=_PANEL)(bench)


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to complete; - reads it from standard input.")],
    server: ask.Server = ask.DEFAULT_SERVER,
    api_key: ask.ApiKey = None,
    api_key_file: ask.ApiKeyFile = None,
    tls: ask.Tls = False,
    ca_file: ask.CaFile = None,
    model: ask.Model = "",
    timeout: ask.Timeout = None,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print the answer as it comes, or at its end.")
    ] = None,
    json: Json = False,
    n: Annotated[int, typer.Option("-n", help="Independent completions of the prompt.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of the tokens, and of so many likeliest ones.")
    ] = None,
    max_tokens: ask.MaxTokens = None,
    temperature: ask.Temperature = None,
    top_k: ask.TopK = None,
    top_p: ask.TopP = None,
    min_p: ask.MinP = None,
    repetition_penalty: ask.RepetitionPenalty = None,
    presence_penalty: ask.PresencePenalty = None,
    frequency_penalty: ask.FrequencyPenalty = None,
    seed: ask.Seed = None,
    stop: ask.Stop = None,
    ignore_eos: ask.IgnoreEos = False,
    time_limit: ask.TimeLimit = None,
    speculation: ask.Speculation = None,
    json_schema: ask.JsonSchema = None,
    regex: ask.Regex = None,
) -> int:
    """Completes a text.

    The model goes on where the text ends; `corolla chat` answers questions.
    """
    from corolla.cli.generate import run_generate
    from corolla.sdk.client import Client

    if logprobs is not None and not json:
        raise typer.BadParameter("--logprobs needs --json, since text shows none")
    options = ask.given(
        model=model, logprobs=logprobs, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, seed=seed, stop=stop, ignore_eos=ignore_eos, time_limit_s=time_limit,
        speculation=speculation, response_format=ask.form(json_schema, regex),
    )  # fmt: skip
    key = ask.api_key(api_key, api_key_file)
    with Client(server, api_key=key, timeout=timeout, credentials=ask.credentials(tls, ca_file)) as client:
        return run_generate(client, prompt, n, options, streams=stream, as_json=json)


def chat(
    server: ask.Server = ask.DEFAULT_SERVER,
    api_key: ask.ApiKey = None,
    api_key_file: ask.ApiKeyFile = None,
    tls: ask.Tls = False,
    ca_file: ask.CaFile = None,
    model: ask.Model = "",
    timeout: ask.Timeout = None,
    system: Annotated[str | None, typer.Option(help="System message: how the model is to answer.")] = None,
    session: Annotated[str | None, typer.Option(help="Go on with an existing session.", show_default=False)] = None,
    tools: ask.Tools = None,
    tool_choice: ask.ToolChoice = None,
    json: Json = False,
    max_tokens: ask.MaxTokens = None,
    temperature: ask.Temperature = None,
    top_k: ask.TopK = None,
    top_p: ask.TopP = None,
    min_p: ask.MinP = None,
    repetition_penalty: ask.RepetitionPenalty = None,
    presence_penalty: ask.PresencePenalty = None,
    frequency_penalty: ask.FrequencyPenalty = None,
    seed: ask.Seed = None,
    stop: ask.Stop = None,
    time_limit: ask.TimeLimit = None,
    speculation: ask.Speculation = None,
    json_schema: ask.JsonSchema = None,
    regex: ask.Regex = None,
) -> int:
    """Talks with the model, which remembers the conversation.

    Ctrl-C stops an answer, Ctrl-D or /exit leaves, /reset starts anew. Without a terminal each line of standard
    input is a turn. Where the model calls tools, the next lines are their results, one for each call.
    """
    from corolla.cli.chat import run_chat
    from corolla.sdk.client import Client

    options = ask.given(
        model=model, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        seed=seed, stop=stop, time_limit_s=time_limit, speculation=speculation,
        tools=None if tools is None else ask.tools_in(tools), tool_choice=tool_choice,
        response_format=ask.form(json_schema, regex),
    )  # fmt: skip
    key = ask.api_key(api_key, api_key_file)
    with Client(server, api_key=key, timeout=timeout, credentials=ask.credentials(tls, ca_file)) as client:
        return run_chat(client, system, session, options, as_json=json)


def status(
    router: Annotated[
        str, typer.Option("--router", "-r", envvar="COROLLA_ROUTER", metavar="HOST:PORT", help="The router.")
    ] = DEFAULT_ROUTER,
    model: Annotated[str, typer.Option("--model", "-m", help="Model, if the service has several.")] = "",
    json: Json = False,
) -> int:
    """Shows which server holds which blocks. Exit status 1 when a block has no server."""
    from corolla.cli.placement_table import run_status

    return run_status(router, model, as_json=json)


def bench(
    server: ask.Server = ask.DEFAULT_SERVER,
    api_key: ask.ApiKey = None,
    tls: ask.Tls = False,
    ca_file: ask.CaFile = None,
    model: ask.Model = "",
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second, at random times.")] = 1.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long requests are sent.")] = 30.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at a time; more wait here.", show_default=False)
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, drawn at random.")] = 128,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    first_token_slo: Annotated[float, typer.Option(help="Good answers begin within so many seconds.")] = 2.0,
    inter_token_slo: Annotated[float, typer.Option(help="Good answers have no longer pause between tokens.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of prompts and times.")] = 0,
    json: Json = False,
) -> int:
    """Loads a service, and measures its answers.

    Requests are sent when they are due, whether or not the service keeps up (open loop). Ctrl-C prints what was
    measured so far.
    """
    from corolla.cli.bench import BenchOptions, run_bench
    from corolla.cli.bench_load import ServiceLevel
    from corolla.sdk.async_client import AsyncClient

    options = BenchOptions(rate, seconds, concurrency, prompt_tokens, answer_tokens, seed)
    shown = ask.credentials(tls, ca_file)
    return run_bench(
        lambda: AsyncClient(server, api_key=api_key, credentials=shown),
        model,
        options,
        ServiceLevel(first_token_slo, inter_token_slo),
        as_json=json,
    )
