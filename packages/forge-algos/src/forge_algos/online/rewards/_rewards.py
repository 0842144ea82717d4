"""Reward functions: plain Python functions of columns of text, whose every value is checked."""

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos._counted import counted
from forge_algos._errors import RewardError
from forge_algos._named import load_named
from forge_algos._time_limit import Call
from forge_algos.online.rewards._foreign import Texts, adapted, reads_of

Scorer = Callable[..., Sequence[float | None]]
"""Function f(prompts=[...], completions=[...], **columns) → a number for each completion,
None or NaN where it cannot be scored; `async def` too."""


MOST = 1e37
"""Largest |reward|, times its weight: sums of several and differences between two are numbers of float32 too."""


class _TimeoutError(RewardError):
    """Call that did not return in time, which no second call would mend."""


@attrs.frozen(kw_only=True)
class Reward:
    """Reward function, its name in messages and files, and its weight."""

    name: str
    function: Scorer
    weight: float = 1.0
    columns: Collection[str] = ()
    """Fields that it is always given, None where no prompt of a rollout has one."""


@attrs.frozen(kw_only=True, eq=False)
class RewardInputs:
    """B completions as reward functions receive them."""

    prompts: Sequence[Any]
    """Text, or messages."""
    completions: Sequence[Any]
    """Text, or one message of the assistant's in a list where the prompt is messages."""
    columns: Mapping[str, Sequence[Any]]
    """Further fields of the prompts' rows."""
    rows: Sequence[int]
    """Number of each one's prompt in the data, for messages."""
    source: Callable[[int], str] = "row {}".format
    """Row's number → its name in messages, such as `prompts.jsonl:12`."""
    texts: Texts = attrs.field(factory=dict)
    """Texts that functions of other libraries read, by name."""

    def one(self, i: int) -> "RewardInputs":
        """Return the i-th completion alone."""
        columns = {name: [values[i]] for name, values in self.columns.items()}
        return attrs.evolve(
            self,
            prompts=[self.prompts[i]],
            completions=[self.completions[i]],
            columns=columns,
            rows=[self.rows[i]],
            texts={name: [values[i]] for name, values in self.texts.items()},
        )


def load_reward(name: str) -> Scorer:
    """Import the function that "package.module:function" or "file.py:function" names.

    One that was written for verl or OpenRLHF is called as there (`rewards._foreign`).

    Raises:
        RewardError: the name has another form, the module or the function is not there, or it cannot be called.

    >>> load_reward("math:fsum")([0.5, 0.25])
    0.75
    """
    found, path = load_named(name, setting="reward", wanted="function")
    if not callable(found):
        raise RewardError(f"reward {name!r}: {path} is no function but {type(found).__name__}")
    return adapted(found)


def check_reward(name: str) -> None:
    """Load a reward function, and check that it takes what it will be called with.

    Raises:
        RewardError: as `load_reward`, or it does not take `prompts` and `completions` by name, or, of verl's and OpenRLHF's,
            it takes more than these give.
    """
    function: Any = load_reward(name)
    if (reads := reads_of(function)) is not None:
        if reads.lacking:
            raise RewardError(
                f"reward {name!r}: it takes {inspect.signature(function)}, and nothing is given as {', '.join(reads.lacking)}: "
                "give a default there, and name the others without `/` before them"
            )
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function of C says nothing about its arguments
    try:
        signature.bind_partial(prompts=[], completions=[])
    except TypeError as error:
        raise RewardError(
            f"reward {name!r}: it is called with prompts=..., completions=... and the fields of the rows by name, and takes "
            f"{signature} ({error}): define it as `def {name.rpartition(':')[2]}(prompts, completions, **fields)`, or as verl "
            "(solution_str, ground_truth) and OpenRLHF (queries, prompts, labels) call theirs"
        ) from error


def reward_columns(name: str) -> set[str]:
    """Return the fields of the rows without which a reward function cannot be called.

    They are its arguments without a default, but for `prompts` and `completions`.

    Raises:
        RewardError: as `load_reward`.
    """
    function = load_reward(name)
    if (reads := reads_of(function)) is not None:
        return set(reads.fields)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()  # a function of C says nothing about its arguments
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name for each in parameters if each.kind in named and each.default is each.empty} - {"prompts", "completions"}


def score(
    reward: Reward, inputs: RewardInputs, *, on_error: Literal["stop", "skip"] = "stop", timeout: float | None = None
) -> NDArray[np.float32]:
    """Call a reward function: float32[B], NaN where a completion cannot be scored.

    A call that fails is repeated for each completion by itself: so the one at fault can be named ("stop"), or left unscored
    alone ("skip"). One that takes longer than `timeout` seconds is not repeated: with "skip" all of its completions go
    unscored.
    """
    if not inputs.completions:
        return np.zeros(0, np.float32)
    scores = np.full(len(inputs.completions), np.nan, np.float32)
    try:
        return _call(reward, inputs, timeout)
    except _TimeoutError:
        if on_error == "stop":
            raise
        return scores
    except RewardError as error:
        failed = error
    for i in range(len(inputs.completions)):
        try:
            scores[i] = _call(reward, inputs.one(i), timeout)[0]
        except RewardError:
            if on_error == "stop":
                raise
    if on_error == "stop":
        # No single call fails, so the message about the joint call stands.
        raise failed
    return scores


def total(
    scores: Mapping[str, NDArray[np.float32]], weights: Mapping[str, float], *, within: tuple[float, float] | None = None
) -> NDArray[np.float32]:
    """Add up weighted scores float32[B] of those that could be scored; NaN where none could.
    A sum outside of `within` is the nearer of its ends.
    """
    stacked = np.stack([weights[name] * values.astype(np.float64) for name, values in scores.items()])
    scored = ~np.isnan(stacked)
    found = np.where(scored.any(0), np.where(scored, stacked, 0).sum(0), np.nan)
    return (found if within is None else found.clip(*within)).astype(np.float32)


def overlong(lengths: NDArray[Any], most: int, buffer: int) -> NDArray[np.float64]:
    """Return the soft overlong punishment of completions, from 0 to 1: float64[B].

    It is 0 up to `most` - `buffer` tokens and rises to 1 at `most` (DAPO, arXiv 2503.14476, equation 13); 0 where `buffer` is.

    >>> overlong(np.array([5, 8, 9, 10]), most=10, buffer=4).tolist()
    [0.0, 0.5, 0.75, 1.0]
    """
    return np.clip((lengths - (most - buffer)) / buffer, 0.0, 1.0) if buffer else np.zeros(len(lengths))


def _call(reward: Reward, inputs: RewardInputs, timeout: float | None = None) -> NDArray[np.float32]:
    B = len(inputs.completions)
    first, last = (inputs.source(each(inputs.rows)) for each in (min, max))
    where = first + _excerpt(inputs, 0) if B == 1 else f"{B} completions of {first} to {last}"
    reads = reads_of(reward.function)
    texts = {name: inputs.texts[name] for name in (reads.texts if reads else ()) if name in inputs.texts}
    columns = dict.fromkeys(reward.columns, [None] * B) | dict(inputs.columns) | texts
    asked = partial(
        reward.function,
        prompts=_copied(inputs.prompts),
        completions=_copied(inputs.completions),
        **{name: _copied(column) for name, column in columns.items()},
    )
    try:
        given = _values(reward, asked, timeout, where)
        # The keys of a dict and the order of a set are no values of completions.
        values = None if given is None or isinstance(given, (dict, set, frozenset)) else list(given)
    except _TimeoutError:
        raise
    except Exception as error:  # whatever a user's function may raise
        raise RewardError(
            f"reward {reward.name!r} raised {type(error).__name__}: {error}, at {_place(reward, error)}, for {where}"
        ) from error
    if values is None or len(values) != B:
        found = (
            counted(len(values), "values") if values is not None else "None" if given is None else f"a {type(given).__name__}"
        )
        raise RewardError(
            f"reward {reward.name!r} ({_place(reward)}) gave {found} for {counted(B, 'completions')}; a list with one number "
            "for each is wanted"
        )
    return np.array([_number(reward, inputs, i, value) for i, value in enumerate(values)], np.float32)


def _copied(values: Sequence[Any]) -> list[Any]:
    """Copy each value: a function may put a decoded image into a message."""
    return [deepcopy(value) for value in values]


def _values(reward: Reward, asked: Callable[[], Any], timeout: float | None, where: str) -> Any:
    """Call the function, and wait for it where what it gives is awaited or has a time limit."""
    if timeout is None:
        given = asked()
        if not inspect.isawaitable(given):
            return given
        asked = partial(_same, given)
    call = Call(asked)
    try:
        return call.future.result(timeout)
    except TimeoutError:
        if call.future.done():
            raise  # the function's own
    raise _TimeoutError(
        f"reward {reward.name!r} did not return within reward_timeout={timeout:g} seconds for {where}: it stands at "
        f"{_place(reward, call)}; raise reward_timeout, or make the function faster"
    )


def _same(value: Any) -> Any:
    return value


def _number(reward: Reward, inputs: RewardInputs, i: int, value: Any) -> float:
    """Return a number up to `MOST` (of numpy or torch too) as float, and None and NaN as NaN."""
    if value is None:
        return math.nan
    try:
        number = math.inf if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.inf
    if abs(number) * max(1.0, abs(reward.weight)) > MOST:
        raise RewardError(
            f"reward {reward.name!r} ({_place(reward)}) gave {_shown(value)} ({type(value).__name__}) for "
            f"{inputs.source(inputs.rows[i])}{_excerpt(inputs, i)}: a number of at most {MOST:g}, its weight included, is "
            "wanted, or None where a completion cannot be scored"
        )
    return number


def _shown(value: Any) -> str:
    """Write a value that is no number; of an array its shape, and of a long one the beginning."""
    if (shape := getattr(value, "shape", ())) != ():
        return f"values of shape {tuple(shape)}"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = "one of too many digits"
    return text if len(text) <= 100 else text[:97] + "..."


def _place(reward: Reward, at: Exception | Call | None = None) -> str:
    return place_of(reward.function, at)


def place_of(function: Any, at: Exception | Call | None = None) -> str:
    """Return file and line at which a function raised or stands, or where it is defined."""
    function = inspect.unwrap(function)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(inspect.unwrap(called), "__code__", None)
    if code is None:
        return f"{type(function).__name__}, which is not written in Python"
    line: int | None = None
    if isinstance(at, Call):
        line = at.stands_at(code.co_filename)
    elif at is not None:
        lines = [frame.lineno for frame in traceback.extract_tb(at.__traceback__) if frame.filename == code.co_filename]
        line = lines[-1] if lines else None
    return f"{code.co_filename}:{line or code.co_firstlineno}"


def _excerpt(inputs: RewardInputs, i: int) -> str:
    text = repr(inputs.completions[i])
    return f", completion {text if len(text) <= 100 else text[:97] + '...'}"
