"""Reward functions written for verl and OpenRLHF → functions of columns, called as there.

They are recognised by the names of their parameters: verl's `compute_score(data_source, solution_str, ground_truth,
extra_info)` and its batched form with `solution_strs`, OpenRLHF's `reward_func(queries, prompts, labels)`.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Texts = Mapping[str, Sequence[str]]

_ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_TEXTS = ("queries", "prompts", "labels")
"""Arguments that each kind is given, where it takes them."""

SOLUTIONS, QUERIES, PROMPT_TEXTS = "solution_texts", "query_texts", "prompt_texts"
"""Texts that such functions read beside messages and fields: completions, prompts with completions, and prompts as they were
asked, the last two with their special tokens."""


class Reads(NamedTuple):
    """What a function of another library is given."""

    fields: frozenset[str]
    """Fields of the rows without which it cannot be called."""
    texts: tuple[str, ...]
    """Names of the texts above."""
    lacking: tuple[str, ...] = ()
    """Parameters without a default that it is not given, or not by name."""


def reads_of(function: Any) -> Reads | None:
    """Return what a function that `adapted` made reads; None for any other."""
    found: Reads | None = getattr(function, "forge_reads", None)
    return found


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of prompts and completions that calls one of verl's or OpenRLHF's.

    Any other is returned as it is.

    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return {"score": float(solution_str == ground_truth), "data_source": data_source}
    >>> row = {"reward_model": [{"style": "rule", "ground_truth": "7"}], "data_source": ["sums"]}
    >>> adapted(compute_score)(prompts=["3 + 4"], completions=["7"], **row)
    [1.0]
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function  # a function of C says nothing about its arguments
    if {"prompts", "completions"} <= parameters.keys():
        return function
    if {"solution_str", "ground_truth"} <= parameters.keys():
        reads = Reads(_fields(parameters, "data_source"), (SOLUTIONS,), _lacking(parameters, _ONE))
        return _marked(function, _verl(function, parameters), reads)
    if {"solution_strs", "ground_truths"} <= parameters.keys():
        reads = Reads(_fields(parameters, "data_sources"), (SOLUTIONS,), _lacking(parameters, _BATCH))
        return _marked(function, _verl_batch(function, parameters), reads)
    if {"queries", "prompts"} <= parameters.keys():
        reads = Reads(frozenset(), (QUERIES, PROMPT_TEXTS), _lacking(parameters, _TEXTS))
        return _marked(function, _openrlhf(function, parameters), reads)
    return function


def _lacking(parameters: Mapping[str, inspect.Parameter], given: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters that stay without a value where these are given by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        name
        for name, each in parameters.items()
        if each.default is each.empty and (each.kind is each.POSITIONAL_ONLY or (each.kind in by_name and name not in given))
    )


def _fields(parameters: Mapping[str, inspect.Parameter], source: str) -> frozenset[str]:
    """Return the fields that a function of verl's cannot do without."""
    named = source in parameters and parameters[source].default is inspect.Parameter.empty
    return frozenset({"reward_model", *(["data_source"] if named else [])})


def _marked(function: Callable[..., Any], call: Callable[..., Any], reads: Reads) -> Any:
    """Give a call the name and file of the function that it calls, and say what it reads."""
    found: Any = functools.wraps(function)(call)
    found.forge_reads = reads
    return found


def _taken(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments that a function takes."""
    whole = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in given.items() if whole or name in parameters}


def _verl(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    def call(prompts: Any, completions: Any, **columns: Any) -> Any:  # noqa: ARG001 - verl gives no prompt
        rows = (dict(zip(_ONE, each, strict=True)) for each in zip(*_rows(completions, columns), strict=True))
        return _of_values([function(**_taken(parameters, row)) for row in rows], lambda found: [_score(each) for each in found])

    return call


def _verl_batch(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    def call(prompts: Any, completions: Any, **columns: Any) -> Any:  # noqa: ARG001 - verl gives no prompts
        asked = _taken(parameters, dict(zip(_BATCH, _rows(completions, columns), strict=True)))
        return _of_values([function(**asked)], lambda found: [_score(each) for each in found[0]])

    return call


def _openrlhf(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    def asked(prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        whole, texts = columns.get(QUERIES), columns.get(PROMPT_TEXTS)
        if whole is None or texts is None:
            if not all(isinstance(each, str) for each in prompts):
                raise ValueError("queries of conversations are known with backend=forge alone")
            texts, whole = list(prompts), [prompt + text_of(each) for prompt, each in zip(prompts, completions, strict=True)]
        labels = ["" if each is None else each for each in columns.get("label") or [None] * len(completions)]
        return _taken(parameters, dict(zip(_TEXTS, (whole, texts, labels), strict=True)))

    def rewards(found: Any) -> Any:
        return found["rewards"] if isinstance(found, Mapping) and "rewards" in found else found

    def call(prompts: Any, completions: Any, **columns: Any) -> Any:
        return _of_values([function(**asked(prompts, completions, columns))], lambda found: rewards(found[0]))

    return call


def _of_values(found: list[Any], read: Callable[[list[Any]], Any]) -> Any:
    """Return what is read of a function's values, or a coroutine of that where they are awaited.

    A value tells, and not the function: `async def` may stand in `__call__` or behind another function.
    """
    if not any(map(inspect.isawaitable, found)):
        return read(found)

    async def one(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def wait() -> Any:
        return read(await asyncio.gather(*map(one, found)))

    return wait()


def _rows(completions: Sequence[Any], columns: Mapping[str, Any]) -> tuple[list[Any], list[str], list[Any], list[Any]]:
    """Return source, text, ground truth and further information of each completion.

    Raises:
        ValueError: a row has no `reward_model` with a `ground_truth`.
    """
    B = len(completions)
    truths = []
    for each in columns.get("reward_model") or [None] * B:
        if not isinstance(each, Mapping) or "ground_truth" not in each:
            raise ValueError(f"a row's reward_model is {each!r}, and {{'ground_truth': ...}} is wanted, as verl's rows have it")
        truths.append(each["ground_truth"])
    extras = [each if isinstance(each, dict) else {} for each in columns.get("extra_info") or [None] * B]
    texts = columns.get(SOLUTIONS)
    texts = [text_of(each) for each in completions] if texts is None else list(texts)
    return list(columns.get("data_source") or [None] * B), texts, truths, extras


def text_of(completion: Any) -> str:
    """Return the text of a completion: itself, or what its messages say."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def _score(found: Any) -> Any:
    """Return a result's number, which verl's functions may put into a mapping as `score`."""
    return found["score"] if isinstance(found, Mapping) and "score" in found else found
