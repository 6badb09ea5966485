"""Renders a checkpoint's chat template for a client service, whose other end is `template_process`."""

from collections.abc import Mapping, Sequence
from typing import Any

from corolla.client.text.bounded_worker import Answer, serve
from corolla.client.text.template import Template, TemplateRefusal


def begin(first: Sequence[Any]) -> Answer:
    """Takes a source and its special tokens. The source is read with the first conversation: that may run away, too."""
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
        except Exception:  # a template is a program of the checkpoint's
            return {"refusal": ""}

    return render


if __name__ == "__main__":
    raise SystemExit(serve(begin))
