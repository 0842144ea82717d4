"""Source of a chat template → program that writes the same text, and marks whose text it is.

The environment is set up as transformers sets up its own (blocks trimmed, loop controls, `{% generation %}`, `tojson`,
`raise_exception`, `strftime_now`, and sandboxed, since templates are untrusted programs). What is different here keeps the
origin that `Traced` strings remember; that the text is the same is checked for every conversation (`_template`).
"""

import json
from collections.abc import Iterable
from datetime import datetime
from functools import cache, lru_cache, partial
from types import CodeType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace

from forge_data.chat_template._limits import CountingRewrite, LimitedEnvironment, written
from forge_data.chat_template._traced_messages import Turn, index_of
from forge_data.chat_template._traced_text import UNPLACED, Mark, Traced, concat, join, leaf_of

# No template can call these, since names of filters have no blank.
_ENTER, _LEAVE, LEARN, _CONCAT = "forge enter", "forge leave", "forge learn", "forge concat"


# Attributes that the sandbox allows anyway: its check takes longer than everything else.
_ALLOWED = frozenset({"endswith", "lstrip", "rstrip", "split", "startswith", "strip"})
_OF_LOOPS = frozenset({"first", "index", "index0", "last", "length"})
_OF_DICTS = frozenset(dir(dict))
KEPT_PROGRAMS = 64
"""Templates whose compiled code a process keeps: each reader of rows, or of a turn end, makes a program of its own of it."""


@cache
def _mark(kind: str, loop: int = 0, message: int = -1) -> Traced:
    return Traced.mark(Mark(kind, loop, message))


@pass_context
def _enter(context: Context, value: object, loop: int) -> Traced:
    """Mark the start of a loop's body; if its value is a message, the text is that message's."""
    environment: Any = context.environment
    environment.budget.step()
    return _mark("enter", loop, index_of(value)) if isinstance(value, Turn) else _mark("leave", loop)


@pass_context
def _leave(_: Context, loop: int) -> Traced:
    return _mark("leave", loop)


@pass_context
def _learn(_: Context, kind: str) -> Traced:
    return _mark(kind)


def _output(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Output:
    return nodes.Output([nodes.Filter(node, name, list(args), [], None, None)])


class Generation(Extension):
    """Tag `{% generation %}`: text within it was written by the assistant."""

    tags = {"generation"}  # noqa: RUF012 - as the parent has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, since in transformers' environment what is set within stays within.
        inside = nodes.Scope(body)
        marked = [_output(nodes.Const("learn"), LEARN), inside, _output(nodes.Const("unlearn"), LEARN)]
        return [node.set_lineno(line) for node in marked]


class _Rewrite(CountingRewrite):
    """Rewrite of a template in which loops mark whose turn it is, and joining keeps origins."""

    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        if not isinstance(node.target, nodes.Name):
            return [super().visit_For(node)]
        self.generic_visit(node)
        self._loops += 1
        loop = nodes.Const(self._loops)
        node.body.insert(0, _output(nodes.Name(node.target.name, "load"), _ENTER, loop).set_lineno(node.lineno))
        return [node, _output(loop, _LEAVE).set_lineno(node.lineno)]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), _CONCAT, [], [], None, None).set_lineno(node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_unmarked(child) for child in node.nodes]
        return node


def _unmarked(node: nodes.Expr) -> nodes.Expr:
    """Remove the filter from `{{ x | safe }}`.

    Nothing is escaped, so it changes nothing, and Markup would lose the origin of the text.
    """
    if isinstance(node, nodes.Filter) and node.name == "safe" and node.node is not None:
        return _unmarked(node.node)
    if isinstance(node, nodes.CondExpr):
        node.expr1 = _unmarked(node.expr1)
        node.expr2 = node.expr2 and _unmarked(node.expr2)
    return node


class _TracingEnvironment(LimitedEnvironment):
    """The environment of transformers for chat templates, in which strings keep their origin."""

    def concat(self, parts: Iterable[str]) -> str:
        """Concatenate what a macro or a block wrote."""
        parts = list(parts)
        self.budget.take(sum(map(len, parts)))
        return concat(parts)

    def join(self, between: str, parts: Iterable[Any]) -> str:
        """Join strings, as `between.join(parts)`."""
        parts = list(parts)
        self.budget.take(len(parts) * len(between) + sum(len(part) for part in parts if isinstance(part, str)))
        return join(between, parts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is str or type(obj) is Traced:
            if attribute == "join":
                # The method of a plain str would lose the origin of what it joins.
                return partial(self.join, obj)
            return getattr(obj, attribute) if attribute in _ALLOWED else super().getattr(obj, attribute)
        if (type(obj) is Turn or type(obj) is dict) and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is _Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Encode a value as JSON, HTML not escaped, as in transformers."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    leaf = leaf_of(value)
    if leaf is None:
        return text
    return concat(('"', value, '"')) if text == f'"{value}"' else Traced(text, ((0, len(text), leaf, UNPLACED),))


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    environment: Any = context.environment
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return environment.join(str(d), map(str, value))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the machine's own time, as transformers has it


class _Dict:
    """The `dict(...)` of a template, without access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Do as `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The `namespace(...)` of a template, in which no name begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot store {name!r} on a namespace: it begins with an underscore")


def add_globals(environment: LimitedEnvironment) -> None:
    """Give templates the functions and the filter that transformers gives them."""
    environment.add_filter("tojson", _tojson)
    names: dict[str, Any] = environment.globals
    names.update(raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace)


@lru_cache(KEPT_PROGRAMS)
def marks_turns(source: str) -> bool:
    """Tell whether a template has `{% generation %}` blocks, not only as text or in a comment."""
    return any(node.name == LEARN for node in parse(source).find_all(nodes.Filter))


def parse(source: str) -> nodes.Template:
    """Parse a template's source into its syntax tree."""
    return _TracingEnvironment(extensions=[Generation, loopcontrols]).parse(source)


def compile_template(source: str) -> tuple[Template, frozenset[str]]:
    """Compile a template's source; also return the names of the arguments that it reads.

    Raises:
        jinja2.TemplateError: the source is not a template.
    """
    code, reads = _compiled(source)
    # An environment of its own, for a rendering keeps what is left to it there.
    environment = _environment()
    return Template.from_code(environment, code, environment.make_globals(None)), reads


@lru_cache(KEPT_PROGRAMS)
def _compiled(source: str) -> tuple[CodeType, frozenset[str]]:
    environment = _environment()
    reads = frozenset(meta.find_undeclared_variables(environment.parse(source)))
    environment.check_constants(environment.parse(source))
    return environment.compile(_Rewrite().visit(environment.parse(source))), reads


def _environment() -> _TracingEnvironment:
    environment = _TracingEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    filters: dict[str, Any] = environment.filters
    filters.update({_ENTER: _enter, _LEAVE: _leave, LEARN: _learn})
    filters["join"] = _join
    environment.add_filter(_CONCAT, lambda parts: concat(map(str, parts)), written)
    add_globals(environment)
    return environment
