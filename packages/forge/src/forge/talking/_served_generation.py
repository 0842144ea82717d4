"""What a request asks for → how transformers' server draws its answer.

Its seed is set where the answer is drawn, one after another; penalties are OpenAI's; and an answer that nobody waits for, or
that the server has no time for, is none: what was drawn of it is not given as the whole.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, Self

from forge.talking._request_fields import Drawing
from forge.talking._requests import BadRequest
from forge.talking._served_logprobs import Logprobs
from forge.talking._stops import until_stop


class Unanswered(Exception):  # noqa: N818 - a request is none because of its client or of a signal, not of an error
    """Request that gets no answer: the server ends, or nobody waits for it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Asking:
    """One request, while it is answered."""

    def __init__(self, receive: Callable[[], Any] | None = None) -> None:
        self.receive = receive
        """ASGI's; says that the client has gone."""
        self.drawing = Drawing()
        self.messages: Any = None
        self.tools: Any = None
        """Those that the template is given."""
        self.logprobs: Logprobs | None = None
        self.gone = threading.Event()

    @classmethod
    def begin(cls, receive: Callable[[], Any] | None = None) -> Self:
        """Take note of a new request of this task."""
        asking = cls(receive)
        _asking.set(asking)
        return asking

    @classmethod
    def now(cls) -> Asking:
        """Return the request of this task."""
        return _asking.get() or cls.begin()

    def require_waiting(self) -> None:
        """Refuse to draw what cannot be given any more.

        Raises:
            Unanswered: the server is ending, or the client has gone.
        """
        if _ending.is_set():
            raise Unanswered("the server is ending, and the answer is not whole; ask again once it is back", 503)
        if self.gone.is_set():
            raise Unanswered("the client has gone", _CLIENT_GONE)

    async def watch(self) -> None:
        """Wait until the client has gone."""
        while self.receive is not None:
            if (await self.receive())["type"] == "http.disconnect":
                self.gone.set()
                return


_CLIENT_GONE = 499
"""Status of a request whose client has gone, as nginx logs it; nobody receives it."""
_ending = threading.Event()
"""Set once the server is to end."""
_asking: ContextVar[Asking | None] = ContextVar("asking", default=None)


class _AskedModel:
    """Model that generates with the seed of one request, and only while that is waited for.

    An error of `generate` is the one thing of which transformers' server tells a stream that has begun.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._asking = model, Asking.now()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **given: Any) -> Any:
        import torch

        asking = self._asking
        asking.require_waiting()
        with nullcontext() if asking.logprobs is None else asking.logprobs.hearing():
            if (seed := asking.drawing.seed) is None:
                return self._model.generate(**given)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return self._model.generate(**given)


def draw_as_asked() -> None:
    """Let transformers' server in this process draw as `Asking.now().drawing` says."""
    from transformers import GenerationConfig
    from transformers.cli.serving.utils import BaseHandler, GenerateManager

    base: Any = BaseHandler
    manager: Any = GenerateManager
    configured = base._build_generation_config
    streaming, whole = manager.generate_streaming, manager.generate_non_streaming

    def build_generation_config(self: Any, body: Any, *given: Any, **more: Any) -> Any:
        drawing = Asking.now().drawing
        settings = body.get("generation_config")
        try:
            config = configured(self, body, *given, **more)
            others = set() if settings is None else json.loads(settings).keys() - vars(GenerationConfig()).keys()
        except (TypeError, ValueError) as error:
            raise BadRequest(f"{error}; give a JSON text of generation settings", "generation_config") from error
        if others:
            raise BadRequest(f"{min(others)!r} is no generation setting of transformers", "generation_config")
        if drawing.sampled is not None:
            config.do_sample = drawing.sampled
        for name in ("top_k", "min_p", "repetition_penalty"):
            if (value := getattr(drawing, name)) is not None:
                setattr(config, name, max(value, 0))
        if drawing.biased:
            config.sequence_bias = {(token,): bias for token, bias in drawing.biased.items()}
        return config

    def generate_streaming(self: Any, model: Any, processor: Any, inputs: Any, config: Any, **more: Any) -> Any:
        given = _prepared(model, processor, inputs, config)
        return streaming(self, _AskedModel(model), processor, given, config, **more)

    async def generate_non_streaming(self: Any, model: Any, processor: Any, inputs: Any, config: Any, **more: Any) -> Any:
        watching = asyncio.create_task(Asking.now().watch())
        try:
            given = _prepared(model, processor, inputs, config)
            return await whole(self, _AskedModel(model), processor, given, config, **more)
        finally:
            watching.cancel()

    base._build_generation_config = build_generation_config
    manager.generate_streaming, manager.generate_non_streaming = generate_streaming, generate_non_streaming


def end_at_once() -> None:
    """Let Ctrl-C and SIGTERM break off answers that are being drawn: uvicorn waits for them."""
    from uvicorn import Server

    server: Any = Server
    handle = server.handle_exit

    def handle_exit(self: Any, *given: Any) -> None:
        _ending.set()
        handle(self, *given)

    server.handle_exit = handle_exit


def _prepared(model: Any, processor: Any, inputs: Any, config: Any) -> dict[str, Any]:
    """Return the arguments of `generate` with the request's penalties and ends.

    It ends at a stop string and where the context is full, and breaks off once it is not waited for.

    Raises:
        BadRequest: the model has no room for the prompt, or for the answer, or no such token; or there is no prompt.
    """
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

    asking, tokens = Asking.now(), inputs["input_ids"].shape[-1]
    drawing = asking.drawing
    if not tokens:
        raise BadRequest("is empty, and this model's tokenizer puts nothing before a text; give a text", "prompt")
    text = model.config.get_text_config()
    if (wrong := max(drawing.biased, default=0)) >= text.vocab_size:
        raise BadRequest(f"the model has no token {wrong}: its last is {text.vocab_size - 1}", "logit_bias")
    _fit(config, tokens, drawing.length, getattr(text, "max_position_embeddings", None))

    class Penalties(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            counts = torch.zeros_like(scores).scatter_add_(
                1, input_ids[:, tokens:], torch.ones_like(input_ids[:, tokens:], dtype=scores.dtype)
            )
            return scores - drawing.frequency_penalty * counts - drawing.presence_penalty * (counts > 0)

    class WaitedFor(StoppingCriteria):
        def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
            asking.require_waiting()
            return torch.zeros(input_ids.shape[:1], dtype=torch.bool, device=input_ids.device)

    stops = [until_stop(processor, drawing.stop, tokens)] if drawing.stop else []
    asking.logprobs = None if drawing.logprobs is None else Logprobs(model, drawing.logprobs)
    if asking.logprobs is not None:
        stops.append(asking.logprobs.criterion())
    more: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([WaitedFor(), *stops])}
    if drawing.frequency_penalty or drawing.presence_penalty:
        more["logits_processor"] = LogitsProcessorList([Penalties()])
    return {**inputs, **more}


def _fit(config: Any, tokens: int, asked: int | None, room: int | None) -> None:
    """Let a prompt and its answer fit into the context of a model.

    Raises:
        BadRequest: they do not.
    """
    if not isinstance(room, int):
        return
    if tokens >= room:
        raise BadRequest(
            f"the prompt has {tokens:,} tokens, and this model's context {room:,}, with the answer; send less",
            "messages",
            "context_length_exceeded",
        )
    if asked is not None and tokens + asked > room:
        raise BadRequest(
            f"the prompt has {tokens:,} tokens, and an answer may have {asked:,}; this model's context is {room:,}; ask for "
            f"{room - tokens:,} or less",
            "max_tokens",
            "context_length_exceeded",
        )
    config.max_new_tokens = min(config.max_new_tokens, room - tokens)
