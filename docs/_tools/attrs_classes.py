"""griffe extension: classes made by attrs get the `__init__` that attrs writes; docstrings are made ready for Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe
from api_pages import escaped  # hooks.py, which mkdocs loads first, finds it

_EXAMPLE = re.compile(r"^>>> .*?(?=\n[ \t]*\n|\Z)", re.MULTILINE | re.DOTALL)


class AttrsClasses(griffe.Extension):
    """Read `attrs.frozen`, `attrs.define` and `attrs.field` from the syntax tree, as griffe itself reads dataclasses."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Prepare a docstring for Markdown."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit every class of a package once all of its modules are loaded: a class may inherit fields."""
        for class_ in _classes(pkg):
            if _decorator(class_) is not None and "__init__" not in class_.members:
                _add_init(class_)
        for class_ in _classes(pkg):
            if _decorator(class_) is not None:
                for field in _fields(class_):
                    field.value = _arguments(field.value).get("default") if _is_field(field.value) else field.value


def as_markdown(text: str) -> str:
    """Fence the examples (`>>>`) of a docstring, and keep `step[rank][batch]` from being read as a link."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    # Every second part is fenced already.
    parts[::2] = [_EXAMPLE.sub("```pycon\n\\g<0>\n```", part) for part in parts[::2]]
    return escaped("".join(parts))


def _classes(parent: griffe.Module | griffe.Class) -> list[griffe.Class]:
    found = []
    for member in list(parent.members.values()):
        if isinstance(member, griffe.Class):
            found.append(member)
        if isinstance(member, griffe.Module | griffe.Class):
            found += _classes(member)
    return found


def _decorator(class_: griffe.Class) -> griffe.Expr | None:
    paths = {"attrs.frozen", "attrs.define", "attrs.mutable"}
    return next(
        (d.value for d in class_.decorators if isinstance(d.value, griffe.Expr) and d.value.canonical_path in paths), None
    )


def _arguments(value: Any) -> dict[str, Any]:
    if not isinstance(value, griffe.ExprCall):
        return {}
    return {argument.name: argument.value for argument in value.arguments if isinstance(argument, griffe.ExprKeyword)}


def _is_field(value: Any) -> bool:
    return isinstance(value, griffe.ExprCall) and value.canonical_path == "attrs.field"


def _fields(class_: griffe.Class) -> list[griffe.Attribute]:
    return [
        member
        for member in class_.members.values()
        if isinstance(member, griffe.Attribute)
        and member.annotation is not None
        and "property" not in member.labels
        and "ClassVar" not in str(member.annotation)
        and not ("class-attribute" in member.labels and "instance-attribute" not in member.labels)
    ]


def _add_init(class_: griffe.Class) -> None:
    fields: dict[str, griffe.Parameter] = {}
    for owner in (*reversed(class_.mro()), class_):
        decorator = _decorator(owner)
        if decorator is None:
            continue
        keywords_only = str(_arguments(decorator).get("kw_only")) == "True"
        for field in _fields(owner):
            given = _arguments(field.value) if _is_field(field.value) else {"default": field.value}
            if str(given.get("init")) == "False":
                continue
            only = keywords_only or str(given.get("kw_only")) == "True"
            fields.pop(field.name, None)
            fields[field.name] = griffe.Parameter(
                field.name.lstrip("_"),
                annotation=field.annotation,
                kind=griffe.ParameterKind.keyword_only if only else griffe.ParameterKind.positional_or_keyword,
                default="..." if "factory" in given else given.get("default"),
                docstring=field.docstring,
            )
    ordered = sorted(fields.values(), key=lambda parameter: parameter.kind is griffe.ParameterKind.keyword_only)
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    class_.set_member(
        "__init__", griffe.Function("__init__", parent=class_, parameters=griffe.Parameters(this, *ordered), returns="None")
    )
