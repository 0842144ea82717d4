"""Program that `forge serve` starts: transformers' server, with OpenAI's errors."""

from __future__ import annotations

import io
import sys
from contextvars import ContextVar
from importlib.metadata import entry_points
from pathlib import Path
from traceback import walk_tb
from typing import Any

import forge_data
from forge.talking._requests import BadRequest, check_messages


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


def refuse_bad_requests(names: tuple[str, ...] = ()) -> None:
    """Let this process answer what it cannot read by status 400 and OpenAI's error object.

    Args:
        names: those of the model, the one that transformers' server knows first; a request with another is refused. ():
            transformers' server decides.
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
        return found

    def checked(messages: Any, modality: Any) -> Any:
        check_messages(messages, str(getattr(modality, "value", modality)), hear)
        return read(messages, modality)

    def answering(answer: Any, field: str) -> Any:
        async def handle_request(self: Any, body: dict[str, Any], request_id: str) -> Any:
            if names and body.get("model") is not None:
                if body["model"] not in names:
                    known = " or ".join(map(repr, names[::-1]))
                    raise BadRequest(f"{body['model']!r} is not served here; ask for {known}, or leave model out", "model")
                body = {**body, "model": names[0]}
            if field not in body:
                wanted = "a text" if field == "prompt" else "a list of messages"
                raise BadRequest(f"nothing came; give {wanted}", field)
            try:
                return await answer(self, body, request_id)
            except BadRequest:
                raise
            except Exception as error:
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

        @app.exception_handler(BadRequest)
        def refused(_: Any, error: BadRequest) -> Any:
            return served.JSONResponse(error.as_json(), status_code=400)

        return app

    base._resolve_model = resolved
    base.get_processor_inputs_from_messages = staticmethod(checked)
    for handler, field in ((ChatCompletionHandler, "messages"), (CompletionHandler, "prompt"), (ResponseHandler, "input")):
        asked: Any = handler
        asked.handle_request = answering(asked.handle_request, field)
    served.build_server = build_server


if __name__ == "__main__":
    given = sys.argv.pop(1)
    list_only(sys.argv[2])
    refuse_bad_requests(names_of(sys.argv[2], given))
    # The command of the very transformers that is installed beside this package, wherever its scripts are.
    (script,) = entry_points(group="console_scripts", name="transformers")
    script.load()()
