"""transformers' server → one that answers as OpenAI's interface has it."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from traceback import walk_tb
from typing import Any

import forge_data
from forge.talking._request_fields import Drawing, read_fields
from forge.talking._requests import BadRequest, as_row, check_messages
from forge.talking._served_answers import error_of, joined, served_events, without_stops
from forge.talking._served_generation import Asking, Unanswered, draw_as_asked
from forge.tasks._system_message import with_system_prompt

_CLOSED = ("/reset", "/load_model")
"""Routes that would unload the model for everybody, or load another one."""
_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")
_OF_PROCESSORS = ("add_special_tokens", "load_audio_from_video", "num_frames", "return_dict", "return_tensors", "tokenize")
"""Arguments of a processor's `apply_chat_template` that are none of a template's."""
_PLACE = "the request"
_DEVELOPER = "forge-developer-message"
"""Text that a template is rendered with to see whether it writes what a developer says."""


def list_only(model: str) -> None:
    """Let `GET /v1/models` of this process list `model`.

    transformers 5.24 does so itself. Before, it lists what lies in the Hub's cache: it fails where there is no cache, does not
    list a directory, and lists models that it answers no request with, since it was given one.
    """
    from transformers.cli.serving.model_manager import ModelManager

    manager: Any = ModelManager
    if not hasattr(manager, "get_gen_models"):
        return
    entry = {"id": model, "object": "model", "created": 0, "owned_by": ""}

    def get_gen_models(*_: object) -> list[dict[str, Any]]:
        return [dict(entry)]

    manager.get_gen_models = staticmethod(get_gen_models)


def names_of(directory: str, given: str) -> tuple[str, ...]:
    """Return the names by which a request may ask for the model.

    The one that is listed, what was given to the command, and the last part of that.
    """
    return tuple(dict.fromkeys((directory, given, Path(given).name or Path(directory).name)))


_processor: ContextVar[Any] = ContextVar("processor", default=None)
"""Processor of the model that a request asks."""
_heard: ContextVar[tuple[str, int] | None] = ContextVar("heard", default=None)
"""Place and samples of the last short clip of a request."""
_SHORT = 0.5
"""Seconds below which a clip is tried: a model may make no token of it, and its forward fail (status 500)."""


def hear(clip: bytes, place: str) -> None:
    """Refuse the bytes of a short clip of which the model's processor makes nothing.

    Raises:
        BadRequest: it does.
    """
    processor = _processor.get()
    try:
        import soundfile

        about = soundfile.info(io.BytesIO(clip))
    except (ImportError, RuntimeError):
        return  # transformers may read it, or says that it cannot
    if processor is None or about.frames >= _SHORT * about.samplerate:
        return
    _heard.set((place, about.frames))
    try:
        inputs = forge_data.MediaInputs(processor)
        placeholder = inputs.placeholders[inputs.kinds.index("audio")]
        _, media = forge_data.messages_with_media(
            {"messages": [{"role": "user", "content": [{"type": "audio", "audio": clip}]}]}, "messages", place=place
        )
        inputs.prompt(placeholder, media, place)
    except forge_data.DataError as error:
        raise BadRequest(f"of its {about.frames} samples the model can make nothing: {error}", place) from error
    except (forge_data.TokenizerError, ValueError):
        return  # transformers' words for what this processor does


@lru_cache(maxsize=1)
def _inputs_of(processor: Any) -> forge_data.MediaInputs:
    return forge_data.MediaInputs(processor)


def as_trained(model: Any, processor: Any) -> Any:
    """Return a processor that reads a request's conversation as training reads it.

    transformers' server chooses 32 frames of a video, whatever the model's own files say, and hears its sound; and it gives a
    chat template a list of parts where training gave it a text. A processor that training does not know reads it all the same.
    """
    if not hasattr(processor, "tokenizer"):
        return processor
    reading, read = copy.copy(processor), processor.apply_chat_template

    def apply_chat_template(conversation: Any, *given: Any, tools: Any = None, **more: Any) -> Any:
        own = {name: value for name, value in more.items() if name not in _OF_PROCESSORS}
        try:
            return _arguments(model, processor, conversation, tools=tools, **own)
        except forge_data.DataError as error:
            raise BadRequest(str(error).removeprefix(f"{_PLACE}: "), "messages") from error
        except forge_data.TokenizerError as error:
            if any(part["type"] == "video" for message in conversation for part in message["content"]):
                raise BadRequest(f"no videos: {error}", "messages") from error
            return read(conversation, *given, tools=tools, **more)

    reading.apply_chat_template = apply_chat_template
    return reading


def _arguments(model: Any, processor: Any, conversation: Any, **given: Any) -> Any:
    """Return the arguments of a forward, as `forge generate` makes them."""
    import torch
    from transformers import BatchFeature

    import forge_algos

    messages = Asking.now().messages
    written = [
        {**made, "content": message["content"]} if isinstance(message.get("content"), str) else made
        for made, message in zip(conversation, messages, strict=True)
    ]
    text = processor.tokenizer.apply_chat_template(written, tokenize=False, **given)
    if all(part["type"] == "text" for message in conversation for part in message["content"]):
        return BatchFeature(dict(processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")))
    inputs = _inputs_of(processor)
    _, media = forge_data.messages_with_media({"messages": as_row(messages)}, "messages", place=_PLACE)
    arrays = inputs.prompt(text, media, _PLACE)
    ids = torch.tensor(arrays.pop("input_ids"))
    made = forge_algos.media_row_inputs(model, ids[0], (0, ids.shape[1]), [arrays], packed={})
    made.pop("use_cache")  # which training does without
    return BatchFeature(made | {"attention_mask": ids.new_ones(ids.shape)})


def _of_template(messages: Any, processor: Any) -> Any:
    """Return messages whose developer is the system where a template leaves out a developer."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    said = [{"role": "developer", "content": _DEVELOPER}, {"role": "user", "content": "hi"}]
    tokenizer: Any = getattr(processor, "tokenizer", processor)
    try:
        known = _DEVELOPER in tokenizer.apply_chat_template(said, tokenize=False)
    except Exception:  # noqa: BLE001 - a template raises what it likes, as for a role that it does not know
        known = False
    if known:
        return messages
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _refuse_unread_tools(tools: Any, processor: Any) -> None:
    """Refuse tools of which the template writes nothing: the model would never know of them.

    Raises:
        BadRequest: it writes the same with and without them.
    """
    tokenizer: Any = getattr(processor, "tokenizer", processor)
    try:
        asked = [{"role": "user", "content": "hi"}]
        plain, written = (tokenizer.apply_chat_template(asked, tokenize=False, tools=each) for each in (None, tools or None))
    except Exception:  # noqa: BLE001 - a template raises what it likes, and says it where the request itself is read
        return
    if tools and plain == written:
        raise BadRequest(
            "this model's chat template writes no tools, so that it would not know of them; leave them out", "tools"
        )


def refuse_bad_requests(names: tuple[str, ...] = (), system: str | None = None) -> None:
    """Let this process answer what it cannot read by status 400 and OpenAI's error object.

    Args:
        names: those of the model, the one that transformers' server knows first; a request with another is refused. ():
            transformers' server decides.
        system: first message of conversations that have no system message.
    """
    from transformers.cli.serving import server
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import BaseHandler

    base: Any = BaseHandler
    served: Any = server
    read, build, resolve = base.get_processor_inputs_from_messages, served.build_server, base._resolve_model

    def resolved(self: Any, body: dict[str, Any]) -> Any:
        found = resolve(self, body)
        _processor.set(found[2])
        return found[0], found[1], as_trained(*found[1:])

    def checked(messages: Any, modality: Any) -> Any:
        check_messages(messages, str(getattr(modality, "value", modality)), hear)
        messages = with_system_prompt(messages, system)
        messages = _of_template(messages, _processor.get())
        _refuse_unread_tools(Asking.now().tools, _processor.get())
        Asking.now().messages = messages
        # transformers gives a template no field but these, and no content beside calls, which training gives it.
        contents = read([{**message, "tool_calls": None} for message in messages], modality)
        made = read(messages, modality)
        return [
            {**message, **each, "content": one["content"]} for message, each, one in zip(messages, made, contents, strict=True)
        ]

    def answering(answer: Any, field: str, known: Any) -> Any:
        async def handle_request(self: Any, body: dict[str, Any], request_id: str) -> Any:
            if names and body.get("model") is not None:
                if body["model"] not in names:
                    listed = " or ".join(map(repr, names[::-1]))
                    raise BadRequest(f"{body['model']!r} is not served here; ask for {listed}, or leave model out", "model")
                body = {**body, "model": names[0]}
            if body.get(field) is None:
                wanted = "a text" if field == "prompt" else "a list of messages"
                raise BadRequest(f"nothing came; give {wanted}", field)
            passed, drawing = read_fields(body, known or body, field)
            asking = Asking.now()
            asking.tools = passed.get("tools")

            async def choice(number: int) -> Any:
                asking.drawing = drawing.of_choice(number)
                return await answer(self, passed, request_id)

            try:
                return await _as_asked(choice, asking, drawing, field)
            except (BadRequest, Unanswered):
                raise
            except Exception as error:
                if passed.get("generation_config") is not None and isinstance(error, (TypeError, ValueError)):
                    raise BadRequest(" ".join(str(error).split())[:300], "generation_config") from error
                if any(frame.f_code.co_name == "apply_chat_template" for frame, _ in walk_tb(error.__traceback__)):
                    why = " ".join(str(error).split())[:300]
                    raise BadRequest(f"this model's template and processor cannot read it: {why}", field) from error
                if clip := _heard.get():
                    # Qwen2-Audio cannot be given a clip for which one token stands.
                    raise BadRequest(
                        f"a clip of {clip[1]} samples is too short for this model; send a longer one", clip[0]
                    ) from error
                raise

        return handle_request

    def build_server(*given: Any, **more: Any) -> Any:
        app = build(*given, **more)
        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in _CLOSED]
        app.add_middleware(_Received)
        _say_errors(app)
        return app

    base._resolve_model = resolved
    base.get_processor_inputs_from_messages = staticmethod(checked)
    for handler, field in ((ChatCompletionHandler, "messages"), (CompletionHandler, "prompt"), (ResponseHandler, "input")):
        asked: Any = handler
        known = getattr(asked._valid_params_class, "__mutable_keys__", None)
        asked.handle_request = answering(asked.handle_request, field, known)
    draw_as_asked()
    served.build_server = build_server


async def _as_asked(choice: Callable[[int], Awaitable[Any]], asking: Asking, drawing: Drawing, field: str) -> Any:
    """Return every answer that is asked for, without stop strings; a stream with its end."""
    first = await choice(0)
    if field == "input":
        return first
    if hasattr(first, "body_iterator"):
        streams = first.body_iterator

        async def answers() -> AsyncIterator[Any]:
            yield streams
            for number in range(1, drawing.choices):
                yield (await choice(number)).body_iterator

        first.body_iterator = served_events(answers(), drawing.stop)
        return first
    found, answer = [], first
    for number in range(drawing.choices):
        answer = answer if number == 0 else await choice(number)
        found.append(without_stops(json.loads(answer.body), drawing.stop))
        if asking.logprobs is not None:
            tokenizer = getattr(_processor.get(), "tokenizer", _processor.get())
            read = asking.logprobs.of_text if field == "prompt" else asking.logprobs.of_messages
            found[-1]["choices"][0]["logprobs"] = read(tokenizer, drawing.stop)
    return type(first)(joined(found), status_code=first.status_code)


class _Received:
    """Middleware that keeps what says that a client has gone."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            Asking.begin(receive)
        await self._app(scope, receive, send)


def _say_errors(app: Any) -> None:
    """Have every error of a server be OpenAI's error object."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    @app.exception_handler(BadRequest)
    def refused(_: Any, error: BadRequest) -> Any:
        return JSONResponse(error.as_json(), status_code=400)

    @app.exception_handler(Unanswered)
    def unanswered(_: Any, error: Unanswered) -> Any:
        return JSONResponse(error_of(str(error), error.status), error.status)

    @app.exception_handler(HTTPException)
    def said(request: Any, error: HTTPException) -> Any:
        detail = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:  # no route, and no word of it
            detail = f"{request.method} {request.url.path[:80]}: not served here; there are {', '.join(_ROUTES)}"
        return JSONResponse(error_of(detail, error.status_code), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    def no_json(_: Any, error: RequestValidationError) -> Any:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return JSONResponse(error_of(f"{where}: {first['msg']}; send a JSON object as application/json", 400, where), 400)

    @app.exception_handler(Exception)
    def failed(_: Any, error: Exception) -> Any:
        why = " ".join(str(error).split())[:300]
        return JSONResponse(error_of(f"the server failed: {type(error).__name__}: {why}", 500), 500)
