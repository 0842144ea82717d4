"""A chat template's source to whether it writes what messages say without ever looking at it.

Such a template has no way to tell one content from another: which of its words it writes, in which loop, and where among them
the contents stand, follows from the roles alone. So one conversation that was traced says where the contents of every other
of the same roles stand (`_skeleton`). Everything that is not known to be blind is taken to look.

Contents are taken to be strings of at least one character that neither begin nor end with a blank: to trim them, or to ask whether
there are any, is no look at them then. Messages are taken to have a role and a content and nothing else.
"""

from enum import Enum

from jinja2 import nodes

from forge_data.chat_template._traced_jinja import parse


class _Kind(Enum):
    PLAIN = "nothing that a message says"
    SAID = "a text that may hold what messages say"
    TURN = "a message"
    TURNS = "messages"


class _LooksError(Exception):
    """The template does something that may tell one content from another."""


_PLAIN, _SAID, _TURN, _TURNS = _Kind
_OF_LOOPS = frozenset({"depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"})
_OF_TYPES = frozenset({"boolean", "defined", "iterable", "mapping", "none", "number", "sequence", "string", "undefined"})
_TRIMS = frozenset({"lstrip", "rstrip", "strip"})
_OF_DICTS = frozenset(dir(dict))


def is_blind(source: str) -> bool:
    """Whether a template never looks at what messages say, so that its output is the same function of it for all that they say."""
    template = parse(source)
    looks = _Looks()
    try:
        known: dict[str, _Kind] = {}
        # A name is what it is anywhere in the template: until nothing new is learned of one.
        while known != looks.names:
            known = dict(looks.names)
            looks.body(template.body)
    except _LooksError:
        return False
    return True


class _Looks:
    """What the names of a template stand for; refuses whatever could look at a content."""

    def __init__(self) -> None:
        self.names = {"messages": _TURNS}

    def body(self, statements: list[nodes.Node]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                self._text(*node.nodes)
            case nodes.If():
                self._of(node.test)
                self.body([*node.body, *node.elif_, *node.else_])
            case nodes.For(recursive=False):
                of = self._of(node.iter)
                if of not in (_PLAIN, _TURNS):
                    raise _LooksError
                self._name(node.target, _TURN if of is _TURNS else _PLAIN)
                if node.test is not None:
                    self._of(node.test)
                self.body([*node.body, *node.else_])
            case nodes.Assign():
                self._name(node.target, self._of(node.node))
            case nodes.Scope():
                self.body(node.body)
            case nodes.Continue() | nodes.Break():
                pass
            case _:
                raise _LooksError

    def _name(self, target: nodes.Node, kind: _Kind) -> None:
        match target:
            case nodes.Name(name=name) if name != "loop":
                self.names[name] = _either(self.names.get(name, _PLAIN), kind)
            case nodes.Tuple() if kind is _PLAIN:
                for item in target.items:
                    self._name(item, kind)
            case nodes.NSRef() if kind is _PLAIN:
                pass
            case _:
                raise _LooksError

    def _text(self, *parts: nodes.Node) -> _Kind:
        """Parts of a text, one after the other."""
        kinds = {self._of(part) for part in parts}
        if not kinds <= {_PLAIN, _SAID}:
            raise _LooksError
        return _SAID if _SAID in kinds else _PLAIN

    def _of(self, node: nodes.Node) -> _Kind:
        match node:
            case nodes.Const() | nodes.TemplateData():
                return _PLAIN
            case nodes.Name(name=name) if name != "loop":
                return self.names.get(name, _PLAIN)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=name):
                return _PLAIN if name in _OF_LOOPS else _look()
            case nodes.Getattr(node=of, attr=name):
                return self._field(self._of(of), name)
            case nodes.Getitem(node=of, arg=nodes.Const(value=str(name))):
                return self._field(self._of(of), name, item=True)
            case nodes.Getitem(node=of, arg=at):
                return self._item(self._of(of), at)
            case nodes.Call(node=nodes.Getattr(node=of, attr=name), args=[], kwargs=[], dyn_args=None, dyn_kwargs=None) if (
                name in _TRIMS
            ):
                return self._text(of)
            case nodes.Filter(node=nodes.Expr() as of, name="trim", args=[], kwargs=[], dyn_args=None, dyn_kwargs=None):
                return self._text(of)
            case nodes.Filter(node=nodes.Expr() as of, name="length" | "count", args=[]) if self._of(of) is _TURNS:
                return _PLAIN
            case nodes.Test() | nodes.Compare() | nodes.Not():
                return self._asked(node)
            case nodes.And() | nodes.Or():
                return _either(self._of(node.left), self._of(node.right))
            case nodes.CondExpr():
                self._of(node.test)
                return _either(self._of(node.expr1), self._of(node.expr2) if node.expr2 is not None else _PLAIN)
            case nodes.Add():
                return self._text(node.left, node.right)
            case nodes.Concat():
                return self._text(*node.nodes)
            case _:
                return self._nothing_said(node)

    def _asked(self, node: nodes.Node) -> _Kind:
        """A question to which no content gives another answer than any other."""
        match node:
            case nodes.Test(node=of, name=name, args=[]) if name in _OF_TYPES:
                self._of(of)
                return _PLAIN
            case nodes.Compare(expr=one, ops=[nodes.Operand(op="in" | "notin", expr=other)]) if self._of(other) is _TURN:
                return _PLAIN if isinstance(one, nodes.Const) else _look()
            case nodes.Compare(expr=one, ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const(value=None | bool() | int()))]):
                # A string is neither of these, whatever it says.
                return _PLAIN if self._of(one) in (_PLAIN, _SAID) else _look()
            case nodes.Not():
                self._of(node.node)
                return _PLAIN
            case _:
                return self._nothing_said(node)

    def _field(self, of: _Kind, name: str, *, item: bool = False) -> _Kind:
        match of:
            case _Kind.PLAIN:
                return _PLAIN
            case _Kind.TURN if name == "content":
                return _SAID
            case _Kind.TURN if item or name not in _OF_DICTS:
                return _PLAIN
            case _:
                return _look()

    def _item(self, of: _Kind, at: nodes.Node) -> _Kind:
        """One of messages, or some of them; which it is depends on nothing that they say."""
        if self._of(at) is not _PLAIN or of in (_SAID, _TURN):
            raise _LooksError
        return _PLAIN if of is _PLAIN else _TURNS if isinstance(at, nodes.Slice) else _TURN

    def _nothing_said(self, node: nodes.Node) -> _Kind:
        """Anything at all, as long as nothing in it is a message or said by one."""
        if isinstance(node, nodes.Name) or any(self._of(part) is not _PLAIN for part in node.iter_child_nodes()):
            raise _LooksError
        return _PLAIN


def _look() -> _Kind:
    raise _LooksError


def _either(one: _Kind, other: _Kind) -> _Kind:
    """What a name is that is now this, now that: by the roles alone, or it would have been refused already."""
    if one is other or other is _PLAIN:
        return one
    return other if one is _PLAIN else _look()
