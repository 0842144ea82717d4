"""Token ids → what the model of a server (vLLM, SGLang) expects in the place of each.

A server reads a prompt that is the whole sample, and says of each of its tokens which ones the model holds likeliest there.
"""

from collections.abc import Sequence
from typing import Any, Literal

from forge_algos._errors import RolloutError
from forge_algos.online.sampling._server import VLLM, Server, SGLang

Likeliest = list[tuple[int, float]]
"""Tokens with their log-probabilities."""


class PromptReader:
    """A server that is asked about tokens that are there, and samples none.

    Args:
        url: its address.
        timeout: seconds that it may take for an answer.
        limit: the setting that says so, for errors.

    Raises:
        RolloutError: nothing answers there, or no such server.
    """

    def __init__(self, url: str, *, timeout: float, limit: str) -> None:
        self._server, self.kind = _found(url, timeout, limit)
        self.model, self.longest = self._server.served()
        self._server.model = self.model

    def tokenize(self, text: str) -> list[int]:
        """Ask for the ids of a text, without special tokens."""
        return self._server.tokenize(text)

    def likeliest(self, ids: Sequence[int], k: int) -> list[Likeliest]:
        """Ask for the k likeliest tokens in the place of each token but the first.

        These are S - 1 places of S ids. The token that stands there may be one more. Log-probabilities are of the whole
        vocabulary, at temperature 1.

        Raises:
            RolloutError: the server failed, gives fewer tokens, or says nothing of some.
        """
        given = [int(each) for each in ids]
        found = self._of_vllm(given, k) if self.kind == "vllm" else self._of_sglang(given, k)
        if len(found) != len(given) - 1 or any(len(each) < k for each in found):
            least = min(map(len, found), default=0)
            raise RolloutError(
                f"{self._server.name} at {self._server.url} says {least} tokens at least of {len(found)} places; {k} of "
                f"{len(given) - 1} were asked for: start it with a higher limit (vLLM: --max-logprobs {k})"
            )
        return found

    def _of_vllm(self, ids: list[int], k: int) -> list[Likeliest]:
        own = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}
        answer = self._server.ask("/v1/completions", {"model": self.model, "prompt": ids, **own})
        places: list[Any] = (answer.get("choices") or [{}])[0].get("prompt_logprobs") or []
        return [[(int(token), float(each["logprob"])) for token, each in (place or {}).items()] for place in places[1:]]

    def _of_sglang(self, ids: list[int], k: int) -> list[Likeliest]:
        own = {"sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True, "logprob_start_len": 0}
        answer = self._server.ask("/generate", {"input_ids": ids, **own, "top_logprobs_num": k})
        places: list[Any] = (answer.get("meta_info") or {}).get("input_top_logprobs") or []
        return [[(int(token), float(logp)) for logp, token, *_ in place or ()] for place in places[1:]]


def _found(url: str, timeout: float, limit: str) -> tuple[Server, Literal["vllm", "sglang"]]:
    """Return the server at an address by what it answers."""
    vllm, sglang = VLLM(url, timeout=timeout), SGLang(url, timeout=timeout)
    vllm.limit = sglang.limit = limit
    try:
        sglang.version()
    except (RolloutError, LookupError, TypeError) as no_sglang:
        if "cannot be reached" in str(no_sglang):
            raise
        vllm.version()
        return vllm, "vllm"
    return sglang, "sglang"
