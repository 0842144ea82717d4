"""Static check of a chat template: does it copy message content without branching on it.

Such a template cannot distinguish one content from another: which of its literals it writes, in which loop, and where the
contents come among them, follows from the roles alone. So one traced conversation shows where the contents of every other with
the same roles are (`masking._span_cache`). A template passes only if every construct in it is known not to branch on content.

Contents are assumed to be strings of at least one character without blanks at their ends: stripping them, or testing whether
there are any, is no branch then. Messages are assumed to have a role and a content and nothing else.
"""

from enum import Enum

from jinja2 import nodes

from forge_data.chat_template._traced_jinja import parse


class _Kind(Enum):
    """Kinds of values in a template."""

    PLAIN = "no message content"
    CONTENT = "a text that may hold message content"
    MESSAGE = "a message"
    MESSAGES = "messages"


class _BranchesError(Exception):
    """The template does something whose result may depend on content."""


_PLAIN, _CONTENT, _MESSAGE, _MESSAGES = _Kind
_LOOP_ATTRIBUTES = frozenset({"depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"})
_TYPE_TESTS = frozenset({"boolean", "defined", "iterable", "mapping", "none", "number", "sequence", "string", "undefined"})
_TRIMS = frozenset({"lstrip", "rstrip", "strip"})
_DICT_ATTRIBUTES = frozenset(dir(dict))


def is_content_blind(source: str) -> bool:
    """Tell whether a template never branches on content."""
    template = parse(source)
    analysis = _Analysis()
    try:
        known: dict[str, _Kind] = {}
        # A name has one kind in the whole template: repeat until no kind changes.
        while known != analysis.names:
            known = dict(analysis.names)
            analysis.body(template.body)
    except _BranchesError:
        return False
    return True


class _Analysis:
    """Kinds of the names of a template; refuses every construct that may branch on content."""

    def __init__(self) -> None:
        self.names = {"messages": _MESSAGES}

    def body(self, statements: list[nodes.Node]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                self._text(*node.nodes)
            case nodes.If():
                self._kind(node.test)
                self.body([*node.body, *node.elif_, *node.else_])
            case nodes.For(recursive=False):
                of = self._kind(node.iter)
                if of not in (_PLAIN, _MESSAGES):
                    raise _BranchesError
                self._name(node.target, _MESSAGE if of is _MESSAGES else _PLAIN)
                if node.test is not None:
                    self._kind(node.test)
                self.body([*node.body, *node.else_])
            case nodes.Assign():
                self._name(node.target, self._kind(node.node))
            case nodes.Scope():
                self.body(node.body)
            case nodes.Continue() | nodes.Break():
                pass
            case _:
                raise _BranchesError

    def _name(self, target: nodes.Node, kind: _Kind) -> None:
        match target:
            case nodes.Name(name=name) if name != "loop":
                self.names[name] = _merged(self.names.get(name, _PLAIN), kind)
            case nodes.Tuple() if kind is _PLAIN:
                for item in target.items:
                    self._name(item, kind)
            case nodes.NSRef() if kind is _PLAIN:
                pass
            case _:
                raise _BranchesError

    def _text(self, *parts: nodes.Node) -> _Kind:
        """Find the kind of parts that are written one after the other."""
        kinds = {self._kind(part) for part in parts}
        if not kinds <= {_PLAIN, _CONTENT}:
            raise _BranchesError
        return _CONTENT if _CONTENT in kinds else _PLAIN

    def _kind(self, node: nodes.Node) -> _Kind:
        match node:
            case nodes.Const() | nodes.TemplateData():
                return _PLAIN
            case nodes.Name(name=name) if name != "loop":
                return self.names.get(name, _PLAIN)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=name):
                return _PLAIN if name in _LOOP_ATTRIBUTES else _refuse()
            case nodes.Getattr(node=of, attr=name):
                return self._field(self._kind(of), name)
            case nodes.Getitem(node=of, arg=nodes.Const(value=str(name))):
                return self._field(self._kind(of), name, item=True)
            case nodes.Getitem(node=of, arg=at):
                return self._item(self._kind(of), at)
            case nodes.Call(node=nodes.Getattr(node=of, attr=name), args=[], kwargs=[], dyn_args=None, dyn_kwargs=None) if (
                name in _TRIMS
            ):
                return self._text(of)
            case nodes.Filter(node=nodes.Expr() as of, name="trim", args=[], kwargs=[], dyn_args=None, dyn_kwargs=None):
                return self._text(of)
            case nodes.Filter(node=nodes.Expr() as of, name="length" | "count", args=[]) if self._kind(of) is _MESSAGES:
                return _PLAIN
            case nodes.Test() | nodes.Compare() | nodes.Not():
                return self._condition(node)
            case nodes.And() | nodes.Or():
                return _merged(self._kind(node.left), self._kind(node.right))
            case nodes.CondExpr():
                self._kind(node.test)
                return _merged(self._kind(node.expr1), self._kind(node.expr2) if node.expr2 is not None else _PLAIN)
            case nodes.Add():
                return self._text(node.left, node.right)
            case nodes.Concat():
                return self._text(*node.nodes)
            case _:
                return self._without_content(node)

    def _condition(self, node: nodes.Node) -> _Kind:
        """Allow a condition that has the same result for every content."""
        match node:
            case nodes.Test(node=of, name=name, args=[]) if name in _TYPE_TESTS:
                self._kind(of)
                return _PLAIN
            case nodes.Compare(expr=one, ops=[nodes.Operand(op="in" | "notin", expr=other)]) if self._kind(other) is _MESSAGE:
                return _PLAIN if isinstance(one, nodes.Const) else _refuse()
            case nodes.Compare(expr=one, ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const(value=None | bool() | int()))]):
                # A string equals none of these, whatever its content.
                return _PLAIN if self._kind(one) in (_PLAIN, _CONTENT) else _refuse()
            case nodes.Not():
                self._kind(node.node)
                return _PLAIN
            case _:
                return self._without_content(node)

    def _field(self, of: _Kind, name: str, *, item: bool = False) -> _Kind:
        match of:
            case _Kind.PLAIN:
                return _PLAIN
            case _Kind.MESSAGE if name == "content":
                return _CONTENT
            case _Kind.MESSAGE if item or name not in _DICT_ATTRIBUTES:
                return _PLAIN
            case _:
                return _refuse()

    def _item(self, of: _Kind, at: nodes.Node) -> _Kind:
        """Find the kind of an item or slice; which one must not depend on content."""
        if self._kind(at) is not _PLAIN or of in (_CONTENT, _MESSAGE):
            raise _BranchesError
        return _PLAIN if of is _PLAIN else _MESSAGES if isinstance(at, nodes.Slice) else _MESSAGE

    def _without_content(self, node: nodes.Node) -> _Kind:
        """Allow any expression in which nothing is a message or content."""
        if isinstance(node, nodes.Name) or any(self._kind(part) is not _PLAIN for part in node.iter_child_nodes()):
            raise _BranchesError
        return _PLAIN


def _refuse() -> _Kind:
    raise _BranchesError


def _merged(one: _Kind, other: _Kind) -> _Kind:
    """Merge two kinds of a name, of which the roles alone decide which it has."""
    if one is other or other is _PLAIN:
        return one
    return other if one is _PLAIN else _refuse()
