"""Conversation → findings about its tool calls and their results."""

from collections.abc import Iterator
from typing import Any

from forge_data._values import describe, from_json
from forge_data.findings._finding import WARN, Finding
from forge_data.findings._rules import found
from forge_data.formats._samples import Message
from forge_data.linting._turns import ChatView

_MISSING = object()


def tool_findings(view: ChatView) -> Iterator[Finding]:
    """Find faulty arguments, calls without result, results without call, and tools not offered."""
    messages = view.chat.messages
    offered = {name: declared for tool in view.chat.tools or [] for name, declared in [_declared(tool)] if name}
    structured = any(message.get("tool_calls") for message in messages)
    for index in range(view.first, len(messages)):
        message = messages[index]
        calls = message.get("tool_calls") or []
        for at, call in enumerate(calls):
            yield from _call(view, index, at, call, offered)
        if calls and index + 1 < len(messages):
            yield from _results(view, index, len(calls))
        if message["role"] == "tool":
            yield from _result(view, index, structured=structured)


def _declared(tool: Any) -> tuple[str | None, dict[str, Any] | None]:
    """Return a tool's name, and its parameters by name where they are declared."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None, None
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return function["name"], properties if isinstance(properties, dict) else None


def _call(view: ChatView, index: int, at: int, call: Any, offered: dict[str, dict[str, Any] | None]) -> Iterator[Finding]:
    nested = isinstance(call, dict) and isinstance(call.get("function"), dict)
    function = call["function"] if nested else call
    if not isinstance(function, dict):
        return
    part = f"tool_calls[{at}]" + (".function" if nested else "")
    name = function.get("name")
    if offered and isinstance(name, str) and name not in offered:
        what = f"{name!r} is called, and the row offers {', '.join(map(repr, sorted(offered)))}"
        yield found("unknown_tool", view.where, view.field(index, f"{part}.name"), what)
    arguments = function.get("arguments", _MISSING)
    fault = _fault(arguments)
    if fault:
        where = view.field(index, f"{part}.arguments")
        yield found(
            "tool_arguments", view.where, where, f"the arguments of {name!r} are {fault}", severity=view.severity(index)
        )
    elif isinstance(arguments, dict):
        declared = offered.get(name) if isinstance(name, str) else None
        for key, value in arguments.items():
            # A null for a declared parameter may be meant.
            if value is None and not (declared and key in declared):
                field = view.field(index, f"{part}.arguments.{key}")
                fix = "take it out, unless null is meant; merged schemas fill in what a row did not have"
                yield found("tool_arguments", view.where, field, f"argument {key!r} is null", severity=WARN, fix=fix)


def _fault(arguments: object) -> str | None:
    """Describe arguments that are neither an object nor JSON text of one; None if they are."""
    if arguments is _MISSING:
        return "missing"
    if isinstance(arguments, str):
        return None if isinstance(from_json(arguments), dict) else f"{describe(arguments)}, which is not a JSON object"
    return None if isinstance(arguments, dict) else describe(arguments)


def _count_results(messages: list[Message], start: int) -> int:
    """Count the consecutive tool messages from `start` on."""
    stop = start
    while stop < len(messages) and messages[stop]["role"] == "tool":
        stop += 1
    return stop - start


def _results(view: ChatView, index: int, calls: int) -> Iterator[Finding]:
    results = _count_results(view.chat.messages, index + 1)
    if results < calls:
        what = f"{calls} call{'s' if calls > 1 else ''}, and {results or 'no'} result{'s' if results > 1 else ''} after"
        yield found("tool_call_without_result", view.where, view.field(index, "tool_calls"), what)


def _result(view: ChatView, index: int, *, structured: bool) -> Iterator[Finding]:
    messages = view.chat.messages
    caller = next((message for message in reversed(messages[:index]) if message["role"] != "tool"), None)
    calls = (caller or {}).get("tool_calls") or []
    # Rows may write their calls as text in the answer; then all that can be required is an assistant before the result.
    if not calls and (structured or caller is None or caller["role"] != "assistant"):
        what = (
            f"a tool's message after {'nothing' if caller is None else 'one of the role ' + caller['role'] + ' without a call'}"
        )
        yield found("tool_result_without_call", view.where, view.field(index, "role"), what)
        return
    wanted = {call.get("id") for call in calls if isinstance(call, dict)} - {None}
    answered = messages[index].get("tool_call_id")
    if wanted and answered is not None and answered not in wanted:
        what = f"tool_call_id is {answered!r}, and the calls before have {', '.join(map(repr, sorted(map(str, wanted))))}"
        yield found("tool_result_without_call", view.where, view.field(index, "tool_call_id"), what)
