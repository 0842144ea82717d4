"""Source of a chat template → its text around any contents, by symbolic execution.

The template runs on symbols in place of contents. A symbol can be written, joined, stripped and tested for being there; asked
whether it has a certain text in it, it says no and the text is noted, since the answer holds without that text alone
(`absent`). Everything else that looks at a symbol ends the run (`LooksError`). So two texts that are equal on symbols are equal
on any contents that are not blank at their ends and have none of those texts in them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial, wraps
from types import CodeType
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.ext import loopcontrols

from forge_data.chat_template._limits import CountingRewrite, LimitedEnvironment, arguments, counted, written
from forge_data.chat_template._traced_jinja import KEPT_PROGRAMS, LEARN, Generation, add_globals

_FIRST = 0xF0000
"""Code point of the first symbol, in the private plane 15; a symbol is one character."""
_CONCAT, _KEPT_OUT = "forge concat", "forge kept out"
_WRITERS = frozenset({_CONCAT, _KEPT_OUT, LEARN, "d", "default", "join", "string", "trim"})
"""Filters that do not look at a text."""
_OF_LISTS = frozenset({"count", "first", "items", "last", "length", "list", "map", "rejectattr", "reverse", "selectattr"})
"""Filters that look at a list and not at the texts in it."""
_TESTS = frozenset(
    {"boolean", "defined", "eq", "equalto", "==", "false", "iterable", "mapping", "ne", "!=", "none", "number", "sequence",
     "string", "true", "undefined"}
)  # fmt: skip
"""Tests that do not look at a text, or compare it as `==` does."""


class LooksError(Exception):
    """The template looks at a content, so its text may depend on it."""


class Symbols:
    """The symbols of some renderings: equal expressions of contents are equal symbols."""

    def __init__(self) -> None:
        self.absent: set[str] = set()
        """Texts that no content may have in it."""
        self._numbers: dict[object, int] = {}

    def symbol(self, expression: object) -> "Symbolic":
        """Return the symbol of an expression: a message's content, or a stripped symbol."""
        return Symbolic(chr(_FIRST + self._numbers.setdefault(expression, len(self._numbers))), self)

    def lacks(self, text: object) -> bool:
        """Note that no content may have a text in it."""
        if type(text) is not str or not text.strip():
            raise LooksError
        self.absent.add(text)
        return True


class Symbolic(str):  # noqa: PLW1641 - its hash would be that of the symbol, and is refused below
    """A text with symbols in it."""

    __slots__ = ("_symbols",)
    _symbols: Symbols

    def __new__(cls, text: str, symbols: Symbols) -> "Symbolic":
        """Make one of a text."""
        made = str.__new__(cls, text)
        made._symbols = symbols
        return made

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: str, /) -> str:
        return Symbolic(str.__add__(self, other), self._symbols) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str, /) -> str:
        return Symbolic(str.__add__(other, self), self._symbols) if isinstance(other, str) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return other != "" and not self._single().lacks(other)
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, text: object) -> bool:
        return not self._single().lacks(text)

    def startswith(self, text: Any, *_: Any) -> bool:
        """Say no, and note it."""
        return not all(self._single().lacks(each) for each in (text if isinstance(text, tuple) else (text,)))

    endswith = startswith

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        """Return the text whole, and note it."""
        del maxsplit
        return [self] if self._single().lacks(sep) else []

    def replace(self, old: Any, new: Any, count: Any = -1) -> str:
        """Return the text whole, and note it."""
        del new, count
        return self if self._single().lacks(old) else ""

    def strip(self, chars: Any = None) -> str:
        """Strip as str does; of a symbol's own blanks nothing is known."""
        return self._stripped("strip", chars)

    def lstrip(self, chars: Any = None) -> str:
        """Do as `strip`."""
        return self._stripped("lstrip", chars)

    def rstrip(self, chars: Any = None) -> str:
        """Do as `strip`."""
        return self._stripped("rstrip", chars)

    def _stripped(self, how: str, chars: Any) -> str:
        if chars is not None and chars.strip():
            # Nothing may be left of a content that is not blank.
            raise LooksError
        if str.__len__(self) == 1:
            return self._symbols.symbol((how, chars, str.__str__(self)))
        text = getattr(str, how)(str.__str__(self), chars)
        edges = (text[:1] if how != "rstrip" else "") + (text[-1:] if how != "lstrip" else "")
        if holds_symbol(edges):
            raise LooksError
        return Symbolic(text, self._symbols)

    def _single(self) -> Symbols:
        """Return the symbols, for a text that is one of them alone."""
        if str.__len__(self) != 1:
            raise LooksError
        return self._symbols


def _look(*_: Any, **__: Any) -> NoReturn:
    raise LooksError


for _name in (
    set(dir(str)) - set(vars(Symbolic)) - {"__class__", "__getattribute__", "__init__", "__init_subclass__", "__len__"}
):
    if callable(getattr(str, _name)) and not _name.startswith(("__get", "__reduce", "__subclass", "__dir", "__del", "__set")):
        setattr(Symbolic, _name, _look)
for _name in ("__hash__", "__getitem__", "__iter__", "__rmod__", "__mod__"):
    setattr(Symbolic, _name, _look)


def holds_symbol(text: str) -> bool:
    """Tell whether a text has symbols in it."""
    return any(ord(character) >= _FIRST for character in text)


class _Rewrite(CountingRewrite):
    """Rewrite of a template in which `~` keeps symbols and `in` refuses them on its left."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), _CONCAT, [], [], None, None).set_lineno(node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for left, compared in zip([node, *node.ops], node.ops, strict=False):
            if compared.op in ("in", "notin"):
                left.expr = nodes.Filter(left.expr, _KEPT_OUT, [], [], None, None, lineno=node.lineno)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> NoReturn:
        """Refuse `{% autoescape %}`, in which texts are of a class that loses symbols."""
        del node
        raise LooksError


class _SymbolicEnvironment(LimitedEnvironment):
    """Jinja environment as transformers', in which only `Symbolic` itself handles symbols."""

    symbols: Symbols

    def concat(self, parts: Iterable[str]) -> str:
        """Join texts that may have symbols in them."""
        text = "".join(parts)
        self.budget.take(len(text))
        return Symbolic(text, self.symbols) if holds_symbol(text) else text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse symbols in `%` and `*`."""
        _refuse_symbols((left, right))
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Join by `concat`; a method of a plain text would lose what it is given."""
        return partial(self._join, obj) if attribute == "join" and isinstance(obj, str) else super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Refuse symbols as keys."""
        _refuse_symbols((argument,))
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Refuse symbols that a method of a plain text is given."""
        if isinstance(getattr(obj, "__self__", None), str) and not isinstance(obj.__self__, Symbolic):
            _refuse_symbols(arguments(args, kwargs))
        return super().call(context, obj, *args, **kwargs)

    def _join(self, between: str, parts: Iterable[Any]) -> str:
        parts = list(parts)
        self.budget.take(len(parts) * len(between))
        woven: list[str] = []
        for part in parts:
            woven += [between, str(part)]
        return self.concat(woven[1:])


def _refuse_symbols(values: Any) -> None:
    """Raise LooksError where a symbol is among values, however deep."""
    if isinstance(values, Symbolic):
        raise LooksError
    if isinstance(values, Mapping):
        _refuse_symbols([*values.keys(), *values.values()])
    elif isinstance(values, (list, tuple)):
        for value in values:
            _refuse_symbols(value)


def _guarded(function: Callable[..., Any], *, deep: bool) -> Callable[..., Any]:
    """Return a filter or test that gets no symbols; with `deep` neither lists of them."""

    # Marks of jinja2 on functions that get the context first are taken over.
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _refuse_symbols((args, kwargs) if deep else [each for each in args if isinstance(each, str)])
        made = function(*args, **kwargs)
        if hasattr(made, "__html__"):
            # Markup loses the symbols of what is added to it.
            raise LooksError
        return made

    return guarded


class SymbolicTemplate:
    """A chat template that runs on symbols."""

    def __init__(self, source: str) -> None:
        code = _compiled(source)
        # An environment of its own, for a rendering keeps its symbols there.
        environment = self._environment = _environment()
        self._template = Template.from_code(environment, code, environment.make_globals(None))

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], symbols: Symbols) -> str:
        """Render messages whose contents are symbols.

        Raises:
            LooksError: the template looks at a content.
            Exception: whatever the template raises.
        """
        self._environment.symbols = symbols
        return str.__str__(self._environment.concat(counted(self._template, {**variables, "messages": messages})))


@lru_cache(KEPT_PROGRAMS)
def _compiled(source: str) -> CodeType:
    environment = _environment()
    return environment.compile(_Rewrite().visit(environment.parse(source)))


def _environment() -> _SymbolicEnvironment:
    environment = _SymbolicEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    add_globals(environment)
    filters: dict[str, Any] = environment.filters
    filters.update(
        {
            name: _guarded(own, deep=name not in _OF_LISTS)
            for name, own in filters.items()
            # A name with a blank is of a filter that counts, and looks at nothing.
            if name not in _WRITERS and " " not in name
        }
    )
    filters.update({LEARN: lambda _: "", _KEPT_OUT: _kept_out})
    environment.add_filter(_CONCAT, lambda parts: environment.concat(map(str, parts)), written)
    filters["join"] = lambda parts, d="": environment._join(str(d), parts)
    tests: dict[str, Any] = environment.tests
    tests.update({name: _guarded(own, deep=True) for name, own in tests.items() if name not in _TESTS})
    return environment


def _kept_out(value: Any) -> Any:
    _refuse_symbols(value)
    return value
