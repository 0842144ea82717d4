"""The messages of a row to turns: the same objects to a template, but each knows which message it is, and so do its strings."""

from collections.abc import Mapping
from typing import Any

from forge_data.chat_template._traced_text import Leaf, Traced

TOOLS = -2
"""The message that tool definitions count as."""

_ARGUMENTS = ".arguments"
_UNTRACED = frozenset({"role"})
"""What a template compares rather than writes out; its own words for a role are the template's."""


class Turn(dict[str, Any]):
    """One message; a copy of it that the template makes is a plain dict, and no longer one."""

    # Names with an underscore are out of a sandboxed template's reach.
    __slots__ = ("_index",)
    _index: int


def index_of(turn: Turn) -> int:
    """Which message it is."""
    return turn._index


def turns_of(messages: list[dict[str, Any]]) -> tuple[list[Turn], list[dict[str, Leaf]]]:
    """The messages as turns, and of each its strings by field, such as `tool_calls[0].function.name`."""
    turns, leaves = [], []
    for index, message in enumerate(messages):
        found: dict[str, Leaf] = {}
        turn = Turn()
        turn._index = index
        for name, value in message.items():
            turn[name] = value if name in _UNTRACED else _traced(value, index, name, found)
        turns.append(turn)
        leaves.append(found)
    return turns, leaves


def _traced(value: Any, message: int, field: str, found: dict[str, Leaf]) -> Any:
    if isinstance(value, str):
        leaf = found[field] = Leaf(message, field, str(value))
        return Traced.of(leaf)
    if isinstance(value, Mapping):
        # A user's own names are those of arguments; all others are the format's.
        named = _ARGUMENTS in field
        return {
            _traced(name, message, f"{field}.{name} (its name)", found) if named else name: _traced(
                item, message, f"{field}.{name}", found
            )
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_traced(item, message, f"{field}[{place}]", found) for place, item in enumerate(value)]
    return value


def traced_tools(tools: list[Any]) -> list[Any]:
    """Tool definitions whose names are traced, so that a template that writes them can be told from one that does not."""
    traced = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        named = function if isinstance(function, Mapping) else tool
        if isinstance(named, Mapping) and isinstance(named.get("name"), str):
            name = Traced.of(Leaf(TOOLS, f"tools[{index}].function.name", named["name"]))
            named = {**named, "name": name}
            traced.append({**tool, "function": named} if isinstance(function, Mapping) else named)
        else:
            traced.append(tool)
    return traced
