"""Messages of a row → turns whose strings remember which message they came from."""

from collections.abc import Mapping
from typing import Any

from forge_data.chat_template._traced_text import Leaf, Traced

TOOLS = -2
"""Message number of tool definitions."""

_ARGUMENTS = ".arguments"
_CONTENT_PART = "content["


class Turn(dict[str, Any]):
    """One message; a copy that the template makes is a plain dict."""

    # A sandboxed template cannot access names with an underscore.
    __slots__ = ("_index",)
    _index: int


def index_of(turn: Turn) -> int:
    """Return the index of its message."""
    return turn._index


def traced_turns(messages: list[dict[str, Any]]) -> tuple[list[Turn], list[dict[str, Leaf]]]:
    """Make turns of messages, and list the strings of each by field (`tool_calls[0].id`, ...)."""
    turns, leaves = [], []
    for index, message in enumerate(messages):
        found: dict[str, Leaf] = {}
        turn = Turn()
        turn._index = index
        for name, value in message.items():
            turn[name] = _traced(value, index, name, found)
        parts = [field for field in found if field.startswith(_CONTENT_PART)]
        if len(parts) == 1:
            # A content with one text, beside images perhaps, is that text.
            found["content"] = found.pop(parts[0])
            found["content"].field = "content"
        turns.append(turn)
        leaves.append(found)
    return turns, leaves


def _traced(value: Any, message: int, field: str, found: dict[str, Leaf]) -> Any:
    if isinstance(value, str):
        if field == "role" or (field.startswith(_CONTENT_PART) and field.endswith("].type")):
            # A template compares these and does not write them; what it writes for them is its own text.
            return value
        leaf = found[field] = Leaf(message, field, str(value))
        return Traced.of(leaf)
    if isinstance(value, Mapping):
        # Keys of arguments are the user's text; all other keys are the format's.
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
    """Trace the names of tool definitions, to see whether a template writes them."""
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
