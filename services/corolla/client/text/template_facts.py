"""Finds out how a chat template uses messages, from its syntax tree. Pure: the template does not run."""

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template does: it iterates over the parts of a message's content; it knows the role `developer`."""

    iterates_content: bool
    knows_developer: bool


def facts_of(tree: nodes.Template) -> TemplateFacts:
    """The facts of a parsed template."""
    names = _content_names(tree)
    return TemplateFacts(
        iterates_content=any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)),
        knows_developer=any(const.value == "developer" for const in tree.find_all(nodes.Const)),
    )


def _content_names(tree: nodes.Template) -> frozenset[str]:
    """The variables and macro parameters that hold a message's content."""
    names: frozenset[str] = frozenset()
    while (more := names | set(_assigned(tree, names)) | set(_passed(tree, names))) != names:
        names = frozenset(more)
    return names


def _assigned(tree: nodes.Template, names: frozenset[str]) -> Iterator[str]:
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            yield assignment.target.name


def _passed(tree: nodes.Template, names: frozenset[str]) -> Iterator[str]:
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        for given, parameter in zip(call.args, macro.args if macro is not None else (), strict=False):
            if _is_content(given, names):
                yield parameter.name


def _is_content(node: nodes.Node, names: frozenset[str]) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr=attr):
            return attr == "content"
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return bool(value == "content")
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_content(inner, names)
    return False
