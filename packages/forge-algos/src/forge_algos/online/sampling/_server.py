"""HTTP interfaces of sampling servers (vLLM, SGLang), spoken to without their packages.

Each class says the same things to its server: what are you, draw these, take these weights. Weights travel by a directory that
both can read. What a route is called and takes is compared with the released servers' sources by a test.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import RolloutError

_WHOLE = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""The whole distribution. All are given, since a server takes what is left out from the model's generation settings."""

_NEVER = -100.0
"""What is added to the logits of tokens that are not to be drawn: the least that vLLM takes."""

_FRAMES = (
    """, and all frames of a video (vLLM: --media-io-kwargs '{"video": {"num_frames": -1}}'; a list of frames with """
    '"sample_fps": 1)'
)
"""What a server is to be started with, so that the model's processor chooses frames there too."""

_RESETS, _BETWEEN_RESETS = 5, 0.5
"""Attempts to reset vLLM's cache of prompts, and the seconds between them."""


class Drawn(NamedTuple):
    """One completion as a server gave it."""

    ids: NDArray[np.int32]
    logps: NDArray[np.float32]
    finished: bool


@attrs.frozen(kw_only=True)
class Draws:
    """What is asked of a server for one prompt."""

    prompt: list[int]
    number: int
    """Completions."""
    max_new_tokens: int
    temperature: float
    seed: int
    end_ids: tuple[int, ...]
    unexpanded: list[int] = attrs.field(factory=list)
    """The prompt with placeholders for media, which the server's own processor is to expand; [] without any."""
    media: list[str] = attrs.field(factory=list)
    """`data:` URIs of the prompt's images, videos and clips, in order."""
    never: tuple[int, ...] = ()
    """Tokens that are not to be drawn: those that stand for parts of media."""

    @property
    def biases(self) -> dict[str, Any]:
        """What keeps tokens from being drawn, as an option of a request."""
        return {"logit_bias": {str(token): _NEVER for token in self.never}} if self.never else {}


class Server(ABC):
    """A sampling server at an address."""

    name: ClassVar[str]
    least: ClassVar[tuple[int, ...]]
    """Oldest version that has the routes."""

    def __init__(self, url: str, *, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self.limit = "sampler_timeout"
        """Setting that says how long an answer may take."""
        self.model = ""
        """What requests name as their model."""
        self.longest: int | None = None
        """Tokens that a prompt with its completion may have, where `check` was told."""
        self.whole = False
        """Whether it was given whole weights, and not an adapter, which requests name by its version."""

    @abstractmethod
    def version(self) -> str:
        """Ask for the server's version."""

    @abstractmethod
    def served(self) -> tuple[str, int | None]:
        """Ask which model is served, and how many tokens it can read."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ask for the ids of a text, without special tokens."""

    @abstractmethod
    def draw(self, draws: Draws, version: str | None) -> list[Drawn]:
        """Ask for completions of a prompt, in order.

        Raises:
            RolloutError: the server failed, gave something else, or drew with other weights than `version`.
        """

    @abstractmethod
    def load(self, directory: str, version: str) -> None:
        """Make the server read all weights from a directory of safetensors."""

    @abstractmethod
    def load_adapter(self, directory: str, version: str, former: str | None) -> None:
        """Make the server read a LoRA adapter, and forget the former one."""

    def takes(self, version: str, *, adapter: bool) -> None:  # noqa: ARG002 - servers name adapters by it
        """Draw with the weights of this version from now on."""
        self.whole = not adapter

    def check(self, text: str, ids: Sequence[int], tokens: int) -> str:
        """Compare version, tokenizer and length with what the run needs; return a line for the log.

        Args:
            text: some text.
            ids: its ids by the trained model's tokenizer.
            tokens: of the longest prompt with its completion.

        Raises:
            RolloutError: another server, an older one, another tokenizer, or too few tokens.
        """
        version = self.version()
        if _numbers(version) < self.least:
            raise RolloutError(
                f"sampler_url {self.url}: {self.name} {version} is older than {'.'.join(map(str, self.least))}, the first "
                "whose interface is known here; update it"
            )
        self.model, self.longest = self.served()
        theirs = self.tokenize(text)
        if theirs != list(ids):
            raise RolloutError(
                f"sampler_url {self.url}: {self.name} serves {self.model!r}, whose tokenizer gives {text!r} the ids "
                f"{theirs[:8]}, and the trained model's gives {list(ids)[:8]}: it serves another model; start it with the run's"
            )
        if self.longest is not None and self.longest < tokens:
            raise RolloutError(
                f"sampler_url {self.url}: {self.name} reads {self.longest:,} tokens at most, and a prompt with its completion "
                f"may have {tokens:,}; start it with a longer context, or lower max_new_tokens"
            )
        return f"{self.name} {version} at {self.url} serves {self.model}"

    def ask(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call a route: GET without a body, else POST of JSON; return the JSON of the answer.

        Raises:
            RolloutError: as of `tell`, and an answer that is no JSON.
        """
        text = self.tell(route, body)
        try:
            return json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise RolloutError(f"{self.name} at {self.url}{route} answered what is no JSON: {text[:200]!r}") from error

    def tell(self, route: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Call a route as `ask` does, whose answer may be anything, and return it.

        Raises:
            RolloutError: no answer within the time limit, or an answer that is an error.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - the settings accept http and https alone
            self.url + route, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:  # noqa: S310 - as above
                return answer.read()
        except urllib.error.HTTPError as error:
            said = error.read()[:400].decode("utf-8", "replace")
            raise RolloutError(f"{self.name} at {self.url}{route} refused: {error.code} {error.reason}: {said}") from error
        except TimeoutError as error:
            raise self._late(route) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            if isinstance(reason, TimeoutError):
                raise self._late(route) from error
            raise RolloutError(
                f"{self.name} at {self.url}{route} cannot be reached: {reason}; start it again, and give the same command: the "
                "run resumes"
            ) from error

    def _late(self, route: str) -> RolloutError:
        return RolloutError(
            f"{self.name} at {self.url}{route} did not answer within {self.limit}={self.timeout:g} seconds; raise it, or "
            "look at the server"
        )

    def same_weights(self, theirs: set[str] | None, version: str | None) -> None:
        """Raise RolloutError where a completion was drawn with other weights than `version`."""
        if self.whole and version is not None and theirs is not None and theirs != {version}:
            raise RolloutError(
                f"{self.name} at {self.url} drew with the weights {', '.join(sorted(theirs))}, and {version} were given to it: "
                "it was started again, or another run uses it; give the same command again, and the run resumes"
            )

    def same_prompt(self, draws: Draws, theirs: Iterable[int] | None) -> None:
        """Raise RolloutError where the server read other tokens than those of a prompt with media."""
        if theirs is None:
            raise RolloutError(
                f"{self.name} at {self.url} does not say which tokens it read of a prompt with media "
                "(prompt_token_ids), so that they cannot be compared: look at the server's version"
            )
        read, ours = [*theirs], draws.prompt
        if read == ours:
            return
        first = [at for at, pair in enumerate(zip(read, ours, strict=False)) if pair[0] != pair[1]]
        frames = _FRAMES if "video" in map(kind_of, draws.media) else ""
        begin = [*first, min(len(read), len(ours))][0]
        raise RolloutError(
            f"{self.name} at {self.url} read {len(read):,} tokens of a prompt with media, where the run's processor "
            f"makes {len(ours):,}, and they differ from token {begin} on. Serve the directory of model_path, with its "
            f"processor's files and no other limits of pixels{frames}; where this server "
            "expands media of the model otherwise, take sampler=transformers"
        )

    def checked(self, draws: Draws, ids: Any, logps: Any, reason: Any) -> Drawn:
        """Check one completion of an answer."""
        tokens, numbers = np.array(ids, np.int32), np.array(logps, np.float32)
        if tokens.ndim != 1 or not 1 <= len(tokens) <= draws.max_new_tokens or tokens.shape != numbers.shape:
            raise RolloutError(
                f"{self.name} at {self.url} gave a completion of {tokens.size} tokens with {numbers.size} log-probabilities; 1 "
                f"to {draws.max_new_tokens} were asked for"
            )
        if drawn := {*tokens.tolist()}.intersection(draws.never):
            raise RolloutError(
                f"{self.name} at {self.url} drew token {min(drawn)}, which stands for a part of media, and whose "
                "logit it was told to lower (logit_bias): look at the server's version"
            )
        finished = bool(tokens[-1] in draws.end_ids)
        # An end token that was the last one allowed may be called either.
        full = reason == "length" and len(tokens) == draws.max_new_tokens
        if finished != (reason == "stop") and not full:
            raise RolloutError(
                f"{self.name} at {self.url} ended a completion for {reason!r}, and its last token {int(tokens[-1])} "
                f"{'ends' if finished else 'does not end'} one: it stops at other tokens than the trained model's"
            )
        if not finished and not full:
            raise RolloutError(
                f"{self.name} at {self.url} ended a completion for {reason!r} after {len(tokens)} of {draws.max_new_tokens} "
                "tokens: another process aborted it, or the server limits what it writes"
            )
        return Drawn(tokens, numbers, finished)


class VLLM(Server):
    """vLLM's OpenAI-compatible server (`vllm serve`)."""

    name = "vLLM"
    least = (0, 33)

    def version(self) -> str:
        return str(self.ask("/version")["version"])

    def served(self) -> tuple[str, int | None]:
        model = self.ask("/v1/models")["data"][0]
        return model["id"], model.get("max_model_len")

    def tokenize(self, text: str) -> list[int]:
        return self.ask("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})["tokens"]

    def draw(self, draws: Draws, version: str | None) -> list[Drawn]:
        own = {
            "n": draws.number,
            "max_tokens": draws.max_new_tokens,
            "temperature": draws.temperature,
            **_WHOLE,
            **draws.biases,
            "seed": draws.seed,
            "logprobs": 0,
            "stop_token_ids": list(draws.end_ids),
        }
        if draws.media:
            # The one route that takes token ids with media; it says which tokens became of them.
            body = {
                "model": self.model,
                "token_ids": draws.unexpanded,
                "content_parts": [{"type": f"{kind_of(url)}_url", "url": url} for url in draws.media],
                "sampling_params": own | {"detokenize": False},
                "return_token_ids": True,
            }
            answer = self.ask("/inference/v1/generate", body)
            self.same_prompt(draws, answer.get("prompt_token_ids"))
        else:
            more = {"return_token_ids": True, "return_weight_versions": True}
            answer = self.ask("/v1/completions", {"model": self.model, "prompt": draws.prompt, **own, **more})
        choices = answer.get("choices", [])
        found = {choice.get("index"): choice for choice in choices}
        if sorted(found) != list(range(draws.number)) or len(choices) != draws.number:
            raise RolloutError(
                f"vLLM at {self.url} gave the choices {[choice.get('index') for choice in choices]}; {draws.number} were "
                "asked for"
            )
        for choice in choices:
            self.same_weights(None if choice.get("weight_versions") is None else _texts(choice["weight_versions"]), version)
        return [
            self.checked(
                draws,
                found[index].get("token_ids") or [],
                _logps(found[index].get("logprobs") or {}),
                found[index].get("finish_reason"),
            )
            for index in range(draws.number)
        ]

    def load(self, directory: str, version: str) -> None:
        self.ask("/pause?mode=wait", {})
        try:
            self.tell("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}})
            self._forget_prompts()
            self.ask("/update_weight_version", {"new_version": version})
        finally:
            self.ask("/resume", {})

    def _forget_prompts(self) -> None:
        """Drop what was computed of prompts with former weights.

        vLLM refuses while a transfer of its caches goes on.
        """
        for attempt in range(_RESETS):
            time.sleep(attempt and _BETWEEN_RESETS)
            if self.ask("/reset_prefix_cache", {}).get("success") is True:
                return
        raise RolloutError(
            f"vLLM at {self.url} did not forget what it computed of prompts with the former weights, asked {_RESETS} times: "
            "transfers of its caches go on, or another run uses it; start it without offloading, and one for each run"
        )

    def load_adapter(self, directory: str, version: str, former: str | None) -> None:
        # vLLM answers these two with a sentence.
        self.tell("/v1/load_lora_adapter", {"lora_name": version, "lora_path": directory})
        if former is not None:
            self.tell("/v1/unload_lora_adapter", {"lora_name": former})

    def takes(self, version: str, *, adapter: bool) -> None:
        super().takes(version, adapter=adapter)
        if adapter:
            self.model = version


class SGLang(Server):
    """SGLang's own interface (`python -m sglang.launch_server`)."""

    name = "SGLang"
    least = (0, 5, 23)

    def __init__(self, url: str, *, timeout: float) -> None:
        super().__init__(url, timeout=timeout)
        self._adapter: str | None = None
        self._seeded = False
        """Whether it draws by seeds (--enable-deterministic-inference), where the `n` of a request are all the same."""

    def version(self) -> str:
        return str(self.ask("/server_info")["version"])

    def served(self) -> tuple[str, int | None]:
        info = self.ask("/server_info")
        self._seeded = bool(info.get("enable_deterministic_inference"))
        # A few tokens less than the context: beyond them it shortens completions without a word, and refuses prompts.
        return self.ask("/model_info")["model_path"], info.get("max_req_input_len")

    def tokenize(self, text: str) -> list[int]:
        return self.ask("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})["tokens"]

    def draw(self, draws: Draws, version: str | None) -> list[Drawn]:
        own = {
            "max_new_tokens": draws.max_new_tokens,
            "temperature": draws.temperature,
            **_WHOLE,
            **draws.biases,
            "stop_token_ids": list(draws.end_ids),
            "skip_special_tokens": False,
        }
        prompt = draws.unexpanded if draws.media else draws.prompt
        if self._seeded:
            prompts: list[Any] = [prompt] * draws.number
            sampling: Any = [{**own, "n": 1, "sampling_seed": draws.seed + index} for index in range(draws.number)]
        else:
            # One request, of which the server computes the prompt once.
            prompts, sampling = [prompt] if draws.media else prompt, {**own, "n": draws.number, "sampling_seed": draws.seed}
        body = {
            "input_ids": prompts,
            "sampling_params": sampling,
            "return_logprob": True,
            **({} if self._adapter is None else {"lora_path": self._adapter}),
            **({"return_prompt_token_ids": True} if draws.media else {}),
        }
        for kind in sorted({kind_of(url) for url in draws.media}):
            body[f"{kind}_data"] = [[url for url in draws.media if kind_of(url) == kind]] * len(prompts)
        answers = self.ask("/generate", body)
        answers = answers if isinstance(answers, list) else [answers]
        if len(answers) != draws.number:
            raise RolloutError(f"SGLang at {self.url} gave {len(answers)} completions; {draws.number} were asked for")
        return [self._drawn(draws, answer, version) for answer in answers]

    def _drawn(self, draws: Draws, answer: Mapping[str, Any], version: str | None) -> Drawn:
        meta = answer.get("meta_info") or {}
        whole = meta.get("weight_version")
        theirs = _texts(meta.get("weight_versions") or []) | (set() if whole is None else {str(whole)})
        self.same_weights(theirs or None, version)
        if draws.media:
            self.same_prompt(draws, answer.get("prompt_token_ids"))
        pairs = meta.get("output_token_logprobs") or []
        return self.checked(
            draws, [pair[1] for pair in pairs], [pair[0] for pair in pairs], (meta.get("finish_reason") or {}).get("type")
        )

    def load(self, directory: str, version: str) -> None:
        body = {"model_path": directory, "weight_version": version, "flush_cache": True, "abort_all_requests": False}
        answer = self.ask("/update_weights_from_disk", body)
        if answer.get("success") is not True:
            raise RolloutError(f"SGLang at {self.url} did not take the weights of {directory}: {answer.get('message')}")

    def load_adapter(self, directory: str, version: str, former: str | None) -> None:
        self.ask("/load_lora_adapter", {"lora_name": version, "lora_path": directory})
        if former is not None:
            self.ask("/unload_lora_adapter", {"lora_name": former})

    def takes(self, version: str, *, adapter: bool) -> None:
        super().takes(version, adapter=adapter)
        if adapter:
            self._adapter = version


SERVERS: dict[str, type[Server]] = {"vllm": VLLM, "sglang": SGLang}
"""Servers by the name that `sampler` has for them."""


def kind_of(uri: str) -> str:
    """Return what a `data:` URI holds: image, video or audio."""
    return uri.removeprefix("data:").partition("/")[0]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "0.33.1.dev2" → (0, 33, 1)."""
    found: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def _logps(given: Mapping[str, Any]) -> Sequence[Any]:
    """Return the log-probabilities in a choice of vLLM's, as either of its routes has them."""
    return given.get("token_logprobs") or [token["logprob"] for token in given.get("content") or ()]


def _texts(spans: Any) -> set[str]:
    """Collect the texts in a list of spans, which are their versions; the rest are positions."""
    values = [value for span in spans for value in (span.values() if isinstance(span, dict) else span)]
    return {value for value in values if isinstance(value, str)}
