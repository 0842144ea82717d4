"""A model and a prompt → an answer, to try what was trained."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Sequence
from pathlib import Path

from forge._errors import SettingsError
from forge.talking._model import AnsweringModel, Kind, Sampling, check_medium, find_model, with_media
from forge.tasks._system_message import with_system_prompt


def generate(
    model_path: str | Path,
    prompt: str | None = None,
    *,
    image: Sequence[str | Path] = (),
    video: Sequence[str | Path] = (),
    audio: Sequence[str | Path] = (),
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    system: str | None = None,
    seed: int = 42,
) -> str:
    """Generate a model's answer to a prompt.

    Args:
        model_path: A model directory, an adapter directory, a run directory (its last export), or a hub name.
        prompt: What the user says; by default what standard input holds. With a tokenizer that has a chat template it becomes a
            user message.
        image: Images that the prompt asks about, shown where it has `<image>`, or before its text; needs a multimodal model.
        video: Videos that it asks about, shown where it has `<video>`, or before its text, behind images.
        audio: Audio clips that it asks about, heard where it has `<audio>`, or before its text, as images are shown.
        max_new_tokens: Stop after so many tokens.
        temperature: 0 always takes the likeliest token; a higher one samples more freely.
        system: A system message before the prompt; needs a chat template. By default the run's `system_prompt`, if it has one;
            "" for none.
        seed: Seed of the sampling.

    Returns:
        The answer, without special tokens. Which template it was asked with is said on standard error, and how an answer came
        about that is empty.

    Raises:
        SettingsError: a value is out of range, or there is no model at `model_path`, or no medium.
        forge_dist.ModelError: the model cannot be loaded, or the hub cannot be asked for it.
        forge_data.ForgeDataError: a medium cannot be read, or the model takes none.

    """
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
    find_model(model_path)
    given: dict[Kind, Sequence[str | Path]] = {"image": image, "video": video, "audio": audio}
    media = [check_medium(str(each), kind) for kind, files in given.items() for each in files]
    prompt = _read_prompt() if prompt is None else prompt
    check_text(prompt, system, alone=not media)
    content, media = with_media(prompt, media)
    asked = {"role": "user", "content": content}
    model = AnsweringModel(model_path, seed=seed)
    print(model.about, file=sys.stderr)
    if not model.converses:
        if system:
            raise SettingsError("system has no effect here: this tokenizer has no chat template.")
        messages = [asked]
    else:
        if (said := model.about_system(system)) is not None:
            print(said, file=sys.stderr)
        messages = with_system_prompt([asked], model.system(system))
    answer = model.answer(messages, sampling, media=media)
    if not answer:
        print(f"the model {model.about_answer}.", file=sys.stderr)
    return answer


def check_text(prompt: str, system: str | None, *, alone: bool = True) -> None:
    """Raise SettingsError for a prompt that is not UTF-8, or empty with no media beside it."""
    if alone and not prompt.strip():
        raise SettingsError("the prompt is empty: give a text.")
    try:
        f"{prompt}{system or ''}".encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"the prompt is not UTF-8: {error.reason} at character {error.start}.") from error


def _read_prompt() -> str:
    """Read the prompt from standard input."""
    if sys.stdin.isatty():
        print("The prompt, and Ctrl-D at its end:", file=sys.stderr)
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise SettingsError(f"the prompt on standard input is not {undecoded(error)}.") from error


def undecoded(error: UnicodeError | SettingsError) -> str:
    """Say in which encoding a text was not, and what chose another than UTF-8."""
    named = getattr(error, "encoding", "utf-8")
    if codecs.lookup(named).name == "utf-8":
        return f"UTF-8: {error}"
    return f"{named}, which PYTHONIOENCODING or the locale says it is: {error}; PYTHONIOENCODING=utf-8 has UTF-8 read"
