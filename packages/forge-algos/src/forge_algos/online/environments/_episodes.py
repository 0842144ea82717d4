"""Prompts → episodes, each a completion whose observations are masked.

The model's tokens stay as they were sampled: a turn is decoded for its environment, and never tokenised again. An episode whose
environment is still busy waits alone: the others take their next turns without it.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from copy import deepcopy
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import ForgeAlgosError, RewardError, RolloutError
from forge_algos._parallel import ALONE, Parallel
from forge_algos._time_limit import Call
from forge_algos.batches._media import continued
from forge_algos.online.environments._environment import Observation, checked_step
from forge_algos.online.rewards._rewards import place_of
from forge_algos.online.sampling._draw import attempt_seed
from forge_algos.online.sampling._sampler import Completion, Sampler, draw_options, greedy_options
from forge_algos.settings._online import OnlineSettings

_TOGETHER = 0.5
"""Seconds for which episodes wait for each other, so that quick environments are sampled in one batch."""
_CALLS = 256
"""Calls of environments at a time."""
_RESET_SEED = 1 << 32
"""Number that keeps the seeds of environments apart from those of tokens."""


class Turns(Protocol):
    """Tokens of a turn ↔ messages; `forge_data.TurnReader` is one."""

    def message(self, ids: Sequence[int], *, chat: bool) -> Mapping[str, Any]:
        """Read the model's turn, with the token that ends it, as a message."""
        ...

    def observation(self, observation: Any, *, chat: bool) -> NDArray[np.int32]:
        """Write an observation as int32[S]: all that stands between two turns of the model."""
        ...


@attrs.define(eq=False)
class _Episode:
    """One episode, as far as it is played."""

    number: int
    """Number among all episodes of the rollout."""
    prompt: Any
    row: int
    environment: Any
    media: Callable[[], Any] | None = None
    call: Call | None = None
    since: float = 0.0
    parts: list[NDArray[np.int32]] = attrs.field(factory=list)
    learned: list[NDArray[np.bool_]] = attrs.field(factory=list)
    logps: list[NDArray[np.float32]] = attrs.field(factory=list)
    messages: list[dict[str, Any]] = attrs.field(factory=list)
    turns: int = 0
    reward: float = 0.0
    finished: bool = False

    @property
    def chat(self) -> bool:
        """Whether it is a conversation, and not plain text."""
        return not isinstance(self.prompt.prompt, str)

    @property
    def tokens(self) -> int:
        """Tokens after the prompt."""
        return sum(map(len, self.parts))

    def context(self) -> NDArray[np.int64]:
        """Return all that the model reads: int64[S]."""
        return np.concatenate([np.asarray(self.prompt.input_ids), *self.parts]).astype(np.int64)

    def media_now(self) -> Callable[[], Any] | None:
        """Return what makes the images of all that the model reads; None without any."""
        if (make := self.media) is None:
            return None
        prompt, length = len(self.prompt.input_ids), len(self.prompt.input_ids) + self.tokens

        def made() -> Any:
            found = make()
            # A server is given no arguments of a forward, and continues what it is given itself.
            return continued(found, prompt, length) if isinstance(found, Mapping) else found

        return made

    def add(self, ids: NDArray[np.int32], logps: NDArray[np.float32] | None, *, learned: bool) -> None:
        """Append tokens of the model, or of an observation."""
        self.parts.append(ids)
        self.learned.append(np.full(len(ids), learned))
        self.logps.append(np.full(len(ids), np.nan, np.float32) if logps is None else logps)

    def completion(self) -> Completion:
        """Return the episode as a completion."""
        logps = np.concatenate(self.logps)
        return Completion(
            ids=np.concatenate(self.parts),
            finished=self.finished,
            learned=np.concatenate(self.learned),
            logps=None if np.isnan(logps).all() else logps,
            reward=self.reward,
            messages=tuple(self.messages),
        )


class Episodes:
    """Plays episodes of one environment class."""

    def __init__(
        self, environment: Callable[[], Any], turns: Turns, *, name: str | None = None, never: Collection[int] = ()
    ) -> None:
        """Take what makes an environment, what reads and writes turns, and a name for messages.

        No observation may have a token of `never`, such as one that stands for a part of an image.
        """
        self._environment, self._turns, self._never = environment, turns, frozenset(never)
        self._name = name or getattr(environment, "__name__", str(environment))

    def play(
        self,
        sampler: Sampler,
        prompts: Sequence[Any],
        *,
        settings: OnlineSettings,
        seed: int,
        numbers: Sequence[int],
        rows: Sequence[int],
        parallel: Parallel = ALONE,
        source: Callable[[int], str] = "row {}".format,
        media: Sequence[Callable[[], Any] | None] | None = None,
        greedy: bool = False,
    ) -> tuple[list[Completion], ForgeAlgosError | None]:
        """Play `num_generations` episodes of each prompt; return them, or the error that ended them.

        With `greedy` it is one of each, of the likeliest tokens, whose environment has the seed of the others'.

        `images` make what the sampler is given of each prompt's images, in every turn.

        A turn follows from the weights, the seed, its episode's number and its own: not from what else was sampled with it.
        """
        options = greedy_options(settings) if greedy else draw_options(settings)
        each = options["num_generations"]
        episodes = [
            _Episode(
                number=numbers[i] * each + which,
                prompt=prompt,
                row=rows[i],
                environment=None,
                media=None if media is None else media[i],
            )
            for i, prompt in enumerate(prompts)
            for which in range(each)
        ]
        played = _Played(self, sampler, settings, options, seed, source, pictured=media is not None)
        played.begin(episodes)
        together = bool(getattr(sampler, "synced", False))
        while parallel.any(played.going) if together else played.going:
            try:
                played.sample(played.ready(), together=together)
            except RolloutError as error:
                if together:
                    raise  # the other ranks wait within the sampler, not here
                played.failed = error
        return [] if played.failed else [episode.completion() for episode in episodes], played.failed


class _Played:
    """Episodes that are under way: which wait for the model, and which for their environments."""

    def __init__(
        self,
        game: Episodes,
        sampler: Sampler,
        settings: OnlineSettings,
        options: Mapping[str, Any],
        seed: int,
        source: Callable[[int], str],
        *,
        pictured: bool,
    ) -> None:
        self._make, self._turns, self._name, self._never = game._environment, game._turns, game._name, game._never
        self._pictured, self._options = pictured, options
        self._sampler, self._settings, self._seed, self._source = sampler, settings, seed, source
        self._queued: deque[tuple[_Episode, Callable[[], Any]]] = deque()
        self._busy: list[_Episode] = []
        self._ready: list[_Episode] = []
        self.failed: ForgeAlgosError | None = None

    @property
    def going(self) -> bool:
        """Whether an episode is not over."""
        return self.failed is None and bool(self._queued or self._busy or self._ready)

    def begin(self, episodes: Sequence[_Episode]) -> None:
        """Make and reset the environment of each."""
        for episode in episodes:
            self._queued.append((episode, lambda episode=episode: self._reset(episode)))
        self._start()

    def ready(self) -> list[_Episode]:
        """Wait for an episode that the model is to continue; return all there are by then."""
        until: float | None = None
        while self.failed is None and (self._queued or self._busy):
            self._start()
            oldest = min(episode.since for episode in self._busy) + self._settings.env_timeout
            left = max(0.0, (oldest if until is None else min(oldest, until)) - time.monotonic())
            calls = {episode.call.future for episode in self._busy if episode.call is not None}
            wait(calls, timeout=left, return_when=FIRST_COMPLETED)
            self._collect()
            if until is None and self._ready:
                until = time.monotonic() + _TOGETHER
            if until is not None and time.monotonic() >= until:
                break
        found = [] if self.failed else sorted(self._ready, key=lambda episode: episode.number)
        self._ready = []
        return found

    def sample(self, episodes: Sequence[_Episode], *, together: bool) -> None:
        """Let the model take the next turn of these.
        With `together` a rank without any takes part too.
        """
        if not episodes and not together:
            return
        own = self._settings
        rooms = [own.max_new_tokens - episode.tokens for episode in episodes]
        options: dict[str, Any] = {**self._options, "num_generations": 1}
        options |= {"media": [episode.media_now() for episode in episodes]} if self._pictured else {}
        made = self._sampler.sample(
            [episode.context() for episode in episodes],
            **options,
            max_new_tokens=max(rooms, default=1),
            seed=self._seed,
            numbers=[episode.number * own.max_turns + episode.turns for episode in episodes],
        )
        for episode, completion, room in zip(episodes, made, rooms, strict=True):
            ids = completion.ids[:room]
            episode.add(ids, None if completion.logps is None else completion.logps[:room], learned=True)
            episode.turns += 1
            message = dict(self._turns.message(ids.tolist(), chat=episode.chat))
            episode.messages.append(message)
            if completion.finished and len(completion.ids) <= room:
                self._queued.append((episode, lambda episode=episode, message=message: episode.environment.step(message)))

    def _reset(self, episode: _Episode) -> Any:
        episode.environment = self._make()
        seed = attempt_seed(self._seed, _RESET_SEED + episode.number // self._options["num_generations"])
        # Copies: an environment may put a decoded image into a message, and the prompt's other episodes are given it too.
        prompt, columns = deepcopy((episode.prompt.prompt, dict(episode.prompt.columns)))
        return episode.environment.reset(prompt=prompt, seed=seed % 2**31, **columns)

    def _start(self) -> None:
        while self._queued and len(self._busy) < _CALLS:
            episode, function = self._queued.popleft()
            episode.call, episode.since = Call(function), time.monotonic()
            self._busy.append(episode)

    def _collect(self) -> None:
        """Take in what calls returned; an episode goes on, is over, or failed."""
        busy, self._busy = self._busy, []
        for episode in busy:
            call = episode.call
            assert call is not None
            late = time.monotonic() - episode.since >= self._settings.env_timeout
            if not call.future.done() and not late:
                self._busy.append(episode)
                continue
            try:
                if not call.future.done():
                    raise _late(self._settings.env_timeout)
                self._take(episode, call.future.result())
            except Exception as error:  # noqa: BLE001 - whatever a user's class may raise
                self._fail(episode, error, call)

    def _take(self, episode: _Episode, value: Any) -> None:
        if not episode.turns:
            if value is not None:
                raise TypeError(f"reset returned {value!r}: nothing is wanted, for the row's prompt is what the model is asked")
            self._ready.append(episode)
            return
        observation, reward, done = checked_step(value)
        episode.reward += reward
        episode.finished = done
        if observation is None or episode.turns == self._settings.max_turns:
            return
        ids = self._turns.observation(observation, chat=episode.chat)
        if not len(ids):
            raise TypeError(f"step returned the observation {observation!r}, of which no token is left")
        if self._never.intersection(ids.tolist()):
            raise TypeError(
                f"step returned the observation {observation!r}, which has a token of an image of this model in it: what an "
                "environment returns is text"
            )
        # One without room for a further token of the model is cut off: what it would read is not trained on.
        if episode.tokens + len(ids) < self._settings.max_new_tokens:
            episode.add(ids, None, learned=False)
            episode.messages += _messages(observation)
            self._ready.append(episode)

    def _fail(self, episode: _Episode, error: Exception, call: Call) -> None:
        """Leave an episode unscored, or end all."""
        if self._settings.on_reward_error == "skip":
            episode.reward, episode.finished = float("nan"), False
            if not episode.turns:
                # It has no token yet, and a completion has one: it is continued by the model once, and rewarded by nothing.
                episode.environment = _Failed(error)
                self._ready.append(episode)
            return
        method = "step" if episode.turns else "reset"
        function = getattr(type(episode.environment), method, None) or self._make
        where = place_of(function, call if isinstance(error, _LateError) else error)
        self.failed = RewardError(
            f"env {self._name!r}: {method} raised {type(error).__name__}: {error}, at {where}, for "
            f"{self._source(episode.row)}, turn {episode.turns}"
        )
        self.failed.__cause__ = error


class _LateError(Exception):
    """Call that did not return in time."""


def _late(seconds: float) -> _LateError:
    return _LateError(f"it did not return within env_timeout={seconds:g} seconds")


class _Failed:
    """Environment whose reset failed: every step fails as it did."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def step(self, _turn: Any) -> Any:
        raise self._error


def _messages(observation: Observation) -> list[dict[str, Any]]:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else [dict(m) for m in observation]
