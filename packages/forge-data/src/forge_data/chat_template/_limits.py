"""Sandbox for chat templates → the same, with limits of steps and characters.

A template is a program of whoever published the model: it may loop for ever, or ask for a string of 100 GB in one operation.
Rounds of loops and calls count as steps. What operations make counts as characters: where it can be much more than they are
given before it is made, and wherever a variable may grow from round to round.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import Template, nodes, pass_context, pass_environment
from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS, STEPS_PER_MESSAGE = 500_000, 1_000
"""Steps of one rendering: a template may compare each message with all others, but not more."""
CHARACTERS, CHARACTERS_PER_CHARACTER = 100_000_000, 1_000
"""Characters that one rendering may make: a template may append each message to all before it."""
_OFTEN = 10_000
"""Characters written after which they are counted."""
_MACRO = 20
"""Steps that a call of a macro counts as: it takes as long as many methods."""
# Filters that no template can call, since names of filters have no blank.
_ROUND, _COUNTED, _LITERAL = "forge round", "forge counted", "forge literal"
_ADDED = frozenset({"_block_vars", "_loop_vars"})
"""Arguments by which jinja2 passes variables of loops and blocks on to what gets the context."""
_NO_CONTEXT: Any = None
# Longer numbers are refused anyway, and take long to read.
_NUMBER = re.compile(r"\d{1,18}")
_BYTES = frozenset({"encode", "to_bytes"})


class LimitError(TemplateRuntimeError):
    """A rendering that takes too many steps, or makes too much text."""


class Budget:
    """What is left to one rendering of a template with its variables."""

    __slots__ = ("_characters", "_given", "_steps")

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._steps = STEPS + STEPS_PER_MESSAGE * len(variables.get("messages", ()))
        self._characters = CHARACTERS
        self._given: Mapping[str, Any] | None = variables

    def step(self, count: int = 1) -> None:
        """Count steps.

        Raises:
            LimitError: there are too many.
        """
        self._steps -= count
        if self._steps < 0:
            raise LimitError(f"one conversation takes it more than {STEPS:,} rounds of loops and calls: it may never end")

    def take(self, characters: int) -> None:
        """Count characters, or elements of a list.

        Raises:
            LimitError: there are too many.
        """
        self._characters -= characters
        if self._characters < 0 and self._given is not None:
            # Counted here, since it takes time and no template that is published comes so far.
            self._characters += CHARACTERS_PER_CHARACTER * min(_nodes(self._given), CHARACTERS)
            self._given = None
        if self._characters < 0:
            raise LimitError(f"one conversation makes it write more than {CHARACTERS:,} characters: it may take all memory")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with a budget, which each rendering sets anew.

    `CountingRewrite` has to rewrite its templates.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.budget = Budget({})
        filters: dict[str, Any] = self.filters
        for name in _COSTS.keys() & filters.keys():
            self.add_filter(name, filters[name])
        filters.update({_ROUND: _round, _COUNTED: _counted, _LITERAL: _literal, "sum": _sum})
        # It is random, so that no rendering with it could be repeated, and as long as it is asked to be.
        self.globals.pop("lipsum", None)

    def add_filter(self, name: str, function: Callable[..., Any], cost: Callable[..., int] | None = None) -> None:
        """Add a filter of which `cost` computes what it makes, by default as that of the same name."""
        filters: dict[str, Any] = self.filters
        cost = cost or _COSTS[name]
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.budget.take(cost(args[first], (*args[first + 1 :], *kwargs.values())))
            made = function(*args, **kwargs)
            self.budget.take(_length(made))
            return made

        filters[name] = limited

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object of a template."""
        self.budget.step(_MACRO if isinstance(obj, Macro) else 1)
        # `str.format` comes wrapped by the sandbox.
        method: Any = getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if not isinstance(owner, str):
            if given := arguments(args, kwargs):
                self.budget.take(_nodes(given))
        else:
            self.budget.take(len(owner))
            if cost := _COSTS.get(method.__name__):
                self.budget.take(cost(owner, arguments(args, kwargs)))
        return super().call(context, obj, *args, **kwargs)

    def call_filter(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a filter for one element of a list, as the filter `map` does."""
        self.budget.step()
        made = super().call_filter(name, value, *args, **kwargs)
        self.budget.take(_length(made))
        return made

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse methods that make bytes, which have no place in a text."""
        return attr not in _BYTES and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation that may make more than its operands."""
        self.budget.take(_COSTS[operator](left, (right,)))
        made = super().call_binop(context, operator, left, right)
        self.budget.take(_length(made))
        return made

    def check_constants(self, tree: nodes.Template) -> None:
        """Compute the constants of a template within the budget, as any compiler does.

        Raises:
            LimitError: they are too large.
        """
        _Constants(self).visit(tree)


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """List the arguments of a call in a template, without the loop variables that jinja2 adds."""
    return [*args, *(value for name, value in kwargs.items() if name not in _ADDED)]


def _budget(context: Context) -> Budget:
    environment: Any = context.environment
    return environment.budget


@pass_environment
def _sum(environment: LimitedEnvironment, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    values = list(values if attribute is None else map(make_attrgetter(environment, attribute), values))
    length = _length(start)
    for value in values:
        # Each sum is made, and the next one of it.
        length += _length(value)
        environment.budget.take(length)
    return sum(values, start)


# With the context, since what needs none of a constant is computed once, when the template is compiled.
@pass_context
def _round(context: Context, _: object) -> str:
    _budget(context).step()
    return ""


@pass_context
def _counted(context: Context, value: Any) -> Any:
    _budget(context).take(_length(value))
    return value


@pass_context
def _literal(context: Context, value: Any) -> Any:
    _budget(context).take(_nodes(value))
    return value


class CountingRewrite(NodeTransformer):
    """Rewrite of a template in which rounds of loops, kept sums, lists and objects count."""

    def visit_For(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        counted = _filtered(nodes.Const("", lineno=node.lineno), _ROUND)
        node.body.insert(0, nodes.Output([counted], lineno=node.lineno))
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        node.node = _kept(node.node)
        return node

    def visit_With(self, node: nodes.With) -> nodes.Node:
        self.generic_visit(node)
        node.values = [_kept(value) for value in node.values]
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.defaults = [_kept(value) for value in node.defaults]
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return self._literal(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self._literal(node, node.items if node.ctx == "load" else [])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return self._literal(node, [pair.value for pair in node.items])

    def _literal(self, node: nodes.Expr, items: list[nodes.Expr]) -> nodes.Expr:
        self.generic_visit(node)
        if all(isinstance(item, nodes.Const) for item in items):
            return node
        # One list twice in another, and that in another: a few lines write more than there is memory for.
        return _filtered(node, _LITERAL)


def _kept(node: Any) -> Any:
    """Count what is kept in a variable, if it is a sum."""
    # `find` looks below a node, and not at it.
    return _filtered(node, _COUNTED) if isinstance(node, nodes.Add) or node.find(nodes.Add) is not None else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Constants(NodeTransformer):
    """Computes constants from the inside out; what depends on a conversation is left."""

    def __init__(self, environment: LimitedEnvironment) -> None:
        self._environment = environment
        self._context = EvalContext(environment)

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if not isinstance(node, nodes.Expr) or isinstance(node, nodes.Const):
            return node
        try:
            if isinstance(node, nodes.BinExpr) and node.operator in self._environment.intercepted_binops:
                left, right = node.left.as_const(self._context), node.right.as_const(self._context)
                value = self._environment.call_binop(_NO_CONTEXT, node.operator, left, right)
            else:
                value = node.as_const(self._context)
        except LimitError:
            raise
        except Exception as error:  # noqa: BLE001 - it is no constant then
            if isinstance(error.__cause__, LimitError):
                # Not `from error`, of which it is the cause: whoever followed causes would go round for ever.
                raise error.__cause__ from None
            return node
        self._environment.budget.take(_length(value))
        return nodes.Const(value, lineno=node.lineno, environment=node.environment)


def counted(template: Template, variables: Mapping[str, Any]) -> Iterator[str]:
    """Render a template chunk by chunk, within a budget that grows with what it is given.

    Raises:
        LimitError: it takes too many steps, or makes too much text.
        Exception: whatever else the template raises.
    """
    environment: Any = template.environment
    budget = environment.budget = Budget(variables)
    written = 0
    try:
        for chunk in template.generate(variables):
            # Taken many at once: there are twenty chunks a row, and each call takes time.
            written += len(chunk)
            if written > _OFTEN:
                budget.take(written)
                written = 0
            yield chunk
        budget.take(written)
    except RecursionError as error:
        raise LimitError("it calls itself too many times, one call within the other") from error


# --- what operations make, about, in characters -------------------------------------------------------------------------------


def _times(value: Any, args: Sequence[Any]) -> int:
    other = args[0]
    return max(_length(value) * _whole(other), _length(other) * _whole(value), _digits(value) + _digits(other))


def _power(value: Any, args: Sequence[Any]) -> int:
    # Powers take longer than their length.
    return 16 * _digits(value) * _whole(args[0])


def _formatted(value: Any, args: Sequence[Any]) -> int:
    if not isinstance(value, str):
        return 0
    given = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list, Mapping)) else args
    values = [*given.values()] if isinstance(given, Mapping) else given
    # A width may be an argument itself.
    wide = _widest(values) if "*" in value or re.search(r":[^{}]*\{", value) else 0
    fields = value.count("%") + value.count("{")
    return sum(map(int, _NUMBER.findall(value))) + fields * (wide + max(map(_nodes, values), default=0))


def _widest(values: Iterable[Any]) -> int:
    """Return the largest number in values, however deep; one in a text may be a width too."""
    return max(map(int, _NUMBER.findall(str([*values]))), default=0)


def _replaced(value: Any, args: Sequence[Any]) -> int:
    # Of str, since a text may be of a class that answers otherwise.
    return (str.count(str(value), str(args[0])) + 1) * len(str(args[1]))


def _filled(_: Any, args: Sequence[Any]) -> int:
    return max(map(_whole, args), default=0)


def _indented(value: Any, args: Sequence[Any]) -> int:
    return len(str(value)) * max((max(_whole(each), _length(each)) for each in args), default=8)


def _translated(value: Any, args: Sequence[Any]) -> int:
    return len(value) * max(map(_nodes, args), default=1)


def written(value: Any, args: Sequence[Any] = ()) -> int:
    """Estimate the characters of a value as text or JSON, with an indent and separators."""
    return _nodes(value) * (1 + max((max(_whole(each), _nodes(each)) for each in args if each is not None), default=0))


_COSTS: dict[str, Callable[[Any, Sequence[Any]], int]] = {
    "*": _times,
    "**": _power,
    "round": lambda _, args: 16 * max(map(_whole, args), default=0),
    **dict.fromkeys(("%", "format", "format_map"), _formatted),
    "replace": _replaced,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "batch", "slice"), _filled),
    **dict.fromkeys(("expandtabs", "indent", "wordwrap"), _indented),
    "translate": _translated,
    **dict.fromkeys(("e", "escape", "forceescape", "pprint", "string", "tojson", "urlize", "xmlattr"), written),
}
"""Operators, filters and methods that may make far more than they are given, and what they make."""


def _whole(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _digits(value: Any) -> int:
    return value.bit_length() // 3 if isinstance(value, int) else 0


def _nodes(value: Any) -> int:
    """Count the nodes and characters of nested lists and objects, as often as each occurs."""
    if isinstance(value, (str, bytes)):
        return len(value)
    total, left = 0, [value]
    for _ in range(STEPS):
        if not left:
            return total
        each = left.pop()
        total += 1
        if isinstance(each, (str, bytes)):
            total += len(each)
        elif isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple)):
            left += each
    # A list that holds one list many times, over and over.
    return sys.maxsize
