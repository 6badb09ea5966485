"""A checkpoint's chat template, which renders messages to text like `apply_chat_template` of transformers.

The module needs only jinja2, so that the process in which `chat` runs it is small and starts fast.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from corolla.client.text.bounded_worker import Answer, serve
from corolla.client.text.template_facts import facts_of

RESERVED_NAMES: Final = frozenset(
    {
        *("add_generation_prompt", "continue_final_message", "documents", "messages", "tools"),
        *("dict", "namespace", "raise_exception", "strftime_now"),
    }
)
"""The names that every template gets."""

_MAX_SENTENCE_CHARS: Final = 300
_END_MARK: Final = "\U000f0003"


class TemplateRefusal(Exception):
    """A template does not accept a conversation. `sentence` is its own, printable message, which may be empty."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence


class Template:
    """One chat template.

    Args:
        source: the template's source, in Jinja.
        special_tokens: texts that the template may name, such as `bos_token`.

    Raises:
        TemplateError, SyntaxError: the source is not a valid template.
        MemoryError, RecursionError: the source is nested too deeply.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: datetime.now().strftime(form),
            dict=_Dict(),
            namespace=_Namespace,
        )
        self._facts = facts_of(environment.parse(source))
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        continues_last: bool = False,
    ) -> str:
        """Renders a conversation. If `continues_last` is true, the text ends with the last message's content.

        Raises:
            TemplateRefusal: the template does not accept this conversation.
            Exception: any other error, since a template is a program from the checkpoint.
        """
        adapted = [self._adapted(message) for message in messages]
        mark = f"{_END_MARK}{secrets.token_hex(16)}{_END_MARK}"
        if continues_last:
            adapted[-1]["content"] = _ending_with(adapted[-1]["content"], f"{mark} ")
        text = self._template.render(
            messages=adapted,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **(arguments or {})},
        )
        return _cut(text, messages[-1]["content"], mark) if continues_last else text

    def _adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with the roles and names that this template uses."""
        values = dict(message)
        if values["role"] == "developer" and not self._facts.knows_developer:
            values["role"] = "system"
        if isinstance(parts := values["content"], list | tuple):
            is_iterated = self._facts.iterates_content
            values["content"] = [{"type": "text", "text": text} for text in parts] if is_iterated else "\n".join(parts)
        if (reasoning := values.get("reasoning_content")) is not None:
            values = {"thinking": reasoning, **values}
        return values


def _ending_with(content: Any, mark: str) -> Any:
    if isinstance(content, str):
        return content + mark
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]


def _cut(text: str, content: Any, mark: str) -> str:
    """The text before the mark, cut as transformers does: without spaces at its end if the template trims messages."""
    before, found, behind = text.rpartition(mark)
    last = content if isinstance(content, str) else content[-1]
    if not found or last.strip() not in text:
        raise TemplateRefusal("the template changes the message that is to be continued")
    return before if behind.startswith(" ") else before.rstrip()


class _Generation(Extension):
    """Renders the text between `generation` and `endgeneration` like any other text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    sentence = str(message)[:_MAX_SENTENCE_CHARS]
    raise TemplateRefusal(
        "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in sentence)
    )


class _Dict:
    """The `dict` of templates, which offers only its call and `fromkeys`."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace that refuses names which begin with an underscore."""

    def __init__(*args: Any, **entries: Any) -> None:  # so that an entry may be named self
        self, *rest = args
        entries = dict(*rest, **entries)
        for name in entries:
            _check_name(name)
        Namespace.__init__(self, entries)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot keep {name!r}")


def begin(first: Sequence[Any]) -> Answer:
    """Takes a template's source and special tokens; returns the function that renders.

    That function parses the source at its first call, under the limits of an answer, since parsing may take too long.
    """
    source, special_tokens = first
    template: Template | None = None

    def render(conversation: Mapping[str, Any]) -> dict[str, str]:
        nonlocal template
        try:
            template = template or Template(source, special_tokens)
            return {"text": str(template.render(**conversation))}
        except MemoryError:
            raise
        except TemplateRefusal as refusal:
            return {"refusal": refusal.sentence}
        except Exception:  # a template is a program from the checkpoint
            return {"refusal": ""}

    return render


if __name__ == "__main__":
    raise SystemExit(serve(begin))
