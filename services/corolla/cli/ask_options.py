"""The options of the commands that ask a running service: each is a field of a class, and declared nowhere else."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    import grpc

    from corolla.sdk.transport import ApiKey as AnyApiKey

Connected = TypeVar("Connected")

_IS_FILE: Final[Mapping[str, Any]] = {"exists": True, "dir_okay": False, "readable": True}


def _place(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Where to ask", **more)


def _answer(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="How the answer is made", show_default=False, **more)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to ask."""

    server: Annotated[
        str, _place("The client service.", "--server", "-s", envvar="COROLLA_SERVER", metavar="HOST:PORT")
    ] = "127.0.0.1:50051"
    api_key: Annotated[str | None, _place("API key, if the service requires one.", envvar="COROLLA_API_KEY")] = None
    api_key_file: Annotated[
        Path | None,
        _place(
            "File with key or token, read at each request, in place of --api-key.", envvar="COROLLA_API_KEY_FILE",
            **_IS_FILE,
        ),
    ] = None  # fmt: skip
    tls: Annotated[bool, _place("Encrypt, and trust the system's certificate authorities.", "--tls")] = False
    ca_file: Annotated[
        Path | None,
        _place("Encrypt, and trust the authorities in this file (PEM).", envvar="COROLLA_CA_FILE", **_IS_FILE),
    ] = None
    model: Annotated[str, _place("Model, if the service has several.", "--model", "-m")] = ""
    timeout: Annotated[float | None, _place("Give up after this many seconds.")] = None

    def client(self, kind: Callable[..., Connected]) -> Connected:
        """A client of this class for the service."""
        return kind(self.server, api_key=self.key, timeout=self.timeout, credentials=self._credentials)

    @property
    def key(self) -> "AnyApiKey":
        """The key to send. A file is read at the beginning of each request, because its token may have been renewed."""
        file = self.api_key_file
        return self.api_key if file is None else lambda: file.read_text().strip()

    @property
    def _credentials(self) -> "grpc.ChannelCredentials | None":
        """The channel's credentials; None for a connection without TLS."""
        if not self.tls and self.ca_file is None:
            return None
        import grpc

        return grpc.ssl_channel_credentials(self.ca_file.read_bytes() if self.ca_file is not None else None)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How an answer is made: options of the SDK, most of them by their names there."""

    max_tokens: Annotated[int | None, _answer("New tokens at most.")] = None
    temperature: Annotated[float | None, _answer("0 always takes the likeliest token.")] = None
    top_k: Annotated[int | None, _answer("Keep the k likeliest tokens.")] = None
    top_p: Annotated[float | None, _answer("Keep the smallest set with this probability.")] = None
    min_p: Annotated[float | None, _answer("Keep tokens this likely next to the likeliest.")] = None
    repetition_penalty: Annotated[float | None, _answer("Above 1: fewer repetitions.")] = None
    presence_penalty: Annotated[float | None, _answer("Above 0: fewer tokens used before.")] = None
    frequency_penalty: Annotated[float | None, _answer("Above 0: fewer tokens used often.")] = None
    seed: Annotated[int | None, _answer("The same seed gives the same answer.")] = None
    stop: Annotated[list[str] | None, _answer("End before this text; may be given several times.")] = None
    time_limit_s: Annotated[
        float | None, _answer("End the answer after this many seconds, with the tokens so far.", "--time-limit")
    ] = None
    speculation: Annotated[
        str | None, _answer("Draft tokens ahead: off, prompt_lookup or draft_model. Tokens stay the same.")
    ] = None
    json_schema: Annotated[
        Path | None, _answer("The answer is JSON that fits the schema in this file.", **_IS_FILE)
    ] = None
    regex: Annotated[str | None, _answer("The answer is a text that this expression matches.")] = None

    @property
    def options(self) -> dict[str, Any]:
        """The options that the caller gave, as the SDK takes them. Raises BadParameter."""
        chosen = {**asdict(self), "response_format": self._form}
        del chosen["json_schema"], chosen["regex"]
        return given(**chosen)

    @property
    def _form(self) -> dict[str, Any] | None:
        if self.json_schema is None:
            return None if self.regex is None else {"type": "regex", "regex": self.regex}
        if self.regex is not None:
            raise typer.BadParameter("give only one of --json-schema and --regex", param_hint="--regex")
        try:
            schema = json.loads(self.json_schema.read_text(encoding="utf-8"))
        except ValueError:
            raise typer.BadParameter("the file does not hold JSON", param_hint="--json-schema") from None
        return {"type": "json_schema", "json_schema": {"schema": schema}}


@dataclass(frozen=True, kw_only=True)
class Completion(Answer):
    ignore_eos: Annotated[bool, _answer("Continue after an end-of-sequence token.", "--ignore-eos")] = False


@dataclass(frozen=True, kw_only=True)
class BenchLoad:
    """The load that `corolla bench` puts on a service."""

    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second, at random times.")] = 1.0
    seconds: Annotated[float, typer.Option(min=0.1, help="How long requests are sent.")] = 30.0
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at a time; more wait here.", show_default=False)
    ] = None
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, drawn at random.")] = 128
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64
    seed: Annotated[int, typer.Option(help="Seed of prompts and times.")] = 0


@dataclass(frozen=True, kw_only=True)
class ChatAnswer(Answer):
    tools: Annotated[
        Path | None, _answer("Tools that the model may call: a list in JSON, as in the OpenAI API.", **_IS_FILE)
    ] = None
    tool_choice: Annotated[str | None, _answer("Whether tools are called: auto, none or required.")] = None

    @property
    def options(self) -> dict[str, Any]:
        """The options that the caller gave, with the tools in the file. Raises InvalidRequest, BadParameter."""
        from corolla.chassis.errors import InvalidRequest

        try:
            tools = {} if self.tools is None else {"tools": json.loads(self.tools.read_text(encoding="utf-8"))}
        except ValueError:
            raise InvalidRequest("--tools", "is not JSON in UTF-8") from None
        return {**super().options, **tools}


def given(**options: Any) -> dict[str, Any]:
    """The options that the caller gave."""
    # `is` compares with False, because 0 and 0.0 equal it and may have been given.
    return {name: each for name, each in options.items() if not (each is None or each is False or each in ([], ""))}


def takes_options(command: Callable[..., int]) -> Callable[..., int]:
    """Gives a command an option for each field of those arguments that are of a class above."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for each in inspect.signature(command).parameters.values():
        if not is_dataclass(each.annotation):
            parameters.append(each)
            continue
        groups[each.name] = each.annotation  # type: ignore[assignment]
        hints = get_type_hints(each.annotation, include_extras=True)
        parameters += [
            inspect.Parameter(field.name, each.kind, default=field.default, annotation=hints[field.name])
            for field in fields(each.annotation)
        ]

    @functools.wraps(command)
    def run(**chosen: Any) -> int:
        for name, group in groups.items():
            chosen[name] = group(**{field.name: chosen.pop(field.name) for field in fields(group)})
        return command(**chosen)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
