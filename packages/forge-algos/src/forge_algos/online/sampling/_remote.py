"""Sampling by a server beside the run, which is given the weights before each rollout."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import RolloutError
from forge_algos.online.sampling._sampler import Completion
from forge_algos.online.sampling._server import SERVERS, Drawn, Draws

_REQUESTS = 64
"""Requests to a server at a time; it batches them itself."""
_MOST_SEEDS = 2**31 - 1


class Unexpanded(Protocol):
    """A prompt with media as a server is given it, such as a `forge_data.Unexpanded`."""

    @property
    def input_ids(self) -> NDArray[Any]:
        """int[S], with the processor's placeholder for each medium."""
        ...

    @property
    def media(self) -> Sequence[str]:
        """Each as a `data:` URI, `data:image/...`, `data:video/...` or `data:audio/...`."""
        ...

    @property
    def expanded(self) -> int:
        """Tokens of the prompt, with those that stand for media."""
        ...


class RemoteSampler:
    """Sampler that asks a server of vLLM or SGLang; its completions have log-probabilities.

    A prompt's request has a seed of its own, so with a server that draws reproducibly its completions do not depend on the
    ranks. Whether the server has the weights that it should is seen in the log-probabilities (`make_rollout` compares them).
    """

    synced = False

    def __init__(self, kind: str, url: str, *, eos_ids: Sequence[int], timeout: float, never: Collection[int] = ()) -> None:
        """Take the kind of server ("vllm", "sglang") and its address; nothing is asked yet.

        Args:
            kind: of server.
            url: its address.
            eos_ids: the tokens that end a completion.
            timeout: seconds that an answer may take.
            never: tokens that are not drawn, however likely, such as those that stand for parts of media.
        """
        self.server = SERVERS[kind](url, timeout=timeout)
        self._eos_ids = tuple(int(i) for i in eos_ids)
        self._never = tuple(sorted(int(i) for i in never))
        self._version: str | None = None

    def check(self, text: str, ids: Sequence[int], tokens: int) -> str:
        """Compare the server's version, tokenizer and length with the run's; see `Server.check`."""
        with self._understood():
            return self.server.check(text, ids, tokens)

    def load(self, directory: str, version: str, *, adapter: bool) -> None:
        """Make the server read the weights, or the adapter, of a directory."""
        with self._understood():
            if adapter:
                self.server.load_adapter(directory, version, self._version)
            else:
                self.server.load(directory, version)
        self.expect(version, adapter=adapter)

    def expect(self, version: str, *, adapter: bool) -> None:
        """Take note, on a rank that did not call `load`, of what the server has by now."""
        self._version = version
        self.server.takes(version, adapter=adapter)

    def sample(
        self,
        prompts: Sequence[NDArray[Any]],
        *,
        num_generations: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        numbers: Sequence[int] | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        media: Sequence[Callable[[], Unexpanded] | None] | None = None,
    ) -> list[Completion]:
        """Sample as `Sampler.sample`, from the whole distribution.

        With a `top_k` of 1 it takes the likeliest tokens.

        Media are given as `Unexpanded`. What the server's processor makes of a prompt and its media must be the prompt.

        Raises:
            RolloutError: the server failed, was late, or gave something else than was asked for, or read other tokens.
        """
        if top_p < 1 or top_k > 1 or min_p or repetition_penalty != 1:
            raise RolloutError(
                "a server samples from the whole distribution here: leave out top_p, top_k, min_p and repetition_penalty"
            )
        known = range(len(prompts)) if numbers is None else numbers
        asked = [
            Draws(
                prompt=np.asarray(prompt).tolist(),
                number=num_generations,
                max_new_tokens=self._room(len(prompt), max_new_tokens),
                temperature=0.0 if top_k == 1 else temperature,
                seed=int(np.random.SeedSequence([seed, number]).generate_state(1)[0]) % _MOST_SEEDS,
                end_ids=self._eos_ids,
                never=self._never,
            )
            for prompt, number in zip(prompts, known, strict=True)
        ]
        pool = ThreadPoolExecutor(_REQUESTS)
        try:
            answers = list(pool.map(self._draw, asked, [None] * len(asked) if media is None else media))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [Completion(ids=drawn.ids, finished=drawn.finished, logps=drawn.logps) for answer in answers for drawn in answer]

    def _draw(self, draws: Draws, media: Callable[[], Unexpanded] | None) -> list[Drawn]:
        if media is not None:
            given = media()
            draws = attrs.evolve(
                draws,
                unexpanded=[*np.asarray(given.input_ids).tolist(), *draws.prompt[given.expanded :]],
                media=[*given.media],
            )
        with self._understood():
            return self.server.draw(draws, self._version)

    def _room(self, length: int, wanted: int) -> int:
        """Return how many tokens to ask for after a prompt: no more than the server has room for.

        A turn of an episode is asked with those of others, of which one may still write more than this one.
        """
        longest = self.server.longest
        return wanted if longest is None or longest <= length else min(wanted, longest - length)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Raise RolloutError for an answer that lacks what is read of it."""
        try:
            yield
        except RolloutError:
            raise
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise RolloutError(
                f"{self.server.name} at {self.server.url} answered something else than {self.server.name} does "
                f"({type(error).__name__}: {error}): look at what serves there, and at its version"
            ) from error
