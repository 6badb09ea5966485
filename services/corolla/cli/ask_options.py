"""The options of the commands that ask a running service."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    import grpc

    from corolla.sdk.transport import ApiKey as AnyApiKey

DEFAULT_SERVER = "127.0.0.1:50051"

_ANSWER = "How the answer is made"
_PLACE = "Where to ask"


def _place(name: str, text: str, *more_names: str, **more: Any) -> Any:
    return typer.Option(f"--{name}", *more_names, help=text, rich_help_panel=_PLACE, **more)


def _answer(name: str, text: str, **more: Any) -> Any:
    return typer.Option(f"--{name}", help=text, rich_help_panel=_ANSWER, show_default=False, **more)


_IS_FILE: Final[Mapping[str, Any]] = {"exists": True, "dir_okay": False, "readable": True}

Server = Annotated[str, _place("server", "The client service.", "-s", envvar="COROLLA_SERVER", metavar="HOST:PORT")]
ApiKey = Annotated[str | None, _place("api-key", "API key, if the service requires one.", envvar="COROLLA_API_KEY")]
ApiKeyFile = Annotated[
    Path | None,
    _place(
        "api-key-file", "File with key or token, read at each request, in place of --api-key.",
        envvar="COROLLA_API_KEY_FILE", **_IS_FILE,
    ),
]  # fmt: skip
Tls = Annotated[bool, _place("tls", "Encrypt, and trust the system's certificate authorities.")]
CaFile = Annotated[
    Path | None,
    _place("ca-file", "Encrypt, and trust the authorities in this file (PEM).", envvar="COROLLA_CA_FILE", **_IS_FILE),
]
Model = Annotated[str, _place("model", "Model, if the service has several.", "-m")]
Timeout = Annotated[float | None, _place("timeout", "Give up after this many seconds.")]

MaxTokens = Annotated[int | None, _answer("max-tokens", "New tokens at most.")]
Temperature = Annotated[float | None, _answer("temperature", "0 always takes the likeliest token.")]
TopK = Annotated[int | None, _answer("top-k", "Keep the k likeliest tokens.")]
TopP = Annotated[float | None, _answer("top-p", "Keep the smallest set with this probability.")]
MinP = Annotated[float | None, _answer("min-p", "Keep tokens this likely next to the likeliest.")]
RepetitionPenalty = Annotated[float | None, _answer("repetition-penalty", "Above 1: fewer repetitions.")]
PresencePenalty = Annotated[float | None, _answer("presence-penalty", "Above 0: fewer tokens used before.")]
FrequencyPenalty = Annotated[float | None, _answer("frequency-penalty", "Above 0: fewer tokens used often.")]
Seed = Annotated[int | None, _answer("seed", "The same seed gives the same answer.")]
Tools = Annotated[
    Path | None, _answer("tools", "Tools that the model may call: a list in JSON, as in the OpenAI API.", **_IS_FILE)
]
ToolChoice = Annotated[str | None, _answer("tool-choice", "Whether tools are called: auto, none or required.")]
Stop = Annotated[list[str] | None, _answer("stop", "End before this text; may be given several times.")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue after an end-of-sequence token.", rich_help_panel=_ANSWER)
]
TimeLimit = Annotated[
    float | None, _answer("time-limit", "End the answer after this many seconds, with the tokens so far.")
]
Speculation = Annotated[
    str | None, _answer("speculation", "Draft tokens ahead: off, prompt_lookup or draft_model. Tokens stay the same.")
]
JsonSchema = Annotated[
    Path | None, _answer("json-schema", "The answer is JSON that fits the schema in this file.", **_IS_FILE)
]
Regex = Annotated[str | None, _answer("regex", "The answer is a text that this expression matches.")]


def form(json_schema: Path | None, regex: str | None) -> dict[str, Any] | None:
    """The form of the answer as the SDK takes it; None for any text. Raises BadParameter."""
    if json_schema is None:
        return None if regex is None else {"type": "regex", "regex": regex}
    if regex is not None:
        raise typer.BadParameter("give only one of --json-schema and --regex", param_hint="--regex")
    try:
        schema = json.loads(json_schema.read_text(encoding="utf-8"))
    except ValueError:
        raise typer.BadParameter("the file does not hold JSON", param_hint="--json-schema") from None
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def tools_in(file: Path) -> Any:
    """The tools in a file. Raises InvalidRequest if the file is not JSON."""
    import json

    from corolla.chassis.errors import InvalidRequest

    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise InvalidRequest("--tools", "is not JSON in UTF-8") from None


def api_key(given: str | None, file: Path | None) -> "AnyApiKey":
    """The key to send. A file is read at the beginning of each request, because its token may have been renewed."""
    return given if file is None else lambda: file.read_text().strip()


def credentials(tls: bool, ca_file: Path | None) -> "grpc.ChannelCredentials | None":
    """The channel's credentials; None for a connection without TLS."""
    if not tls and ca_file is None:
        return None
    import grpc

    return grpc.ssl_channel_credentials(ca_file.read_bytes() if ca_file is not None else None)


def given(**options: Any) -> dict[str, Any]:
    """The options that the caller gave."""
    # `is` compares with False, because 0 and 0.0 equal it and may have been given.
    return {
        name: value for name, value in options.items() if not (value is None or value is False or value in ([], ""))
    }
