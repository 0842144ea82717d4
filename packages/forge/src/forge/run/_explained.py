"""Error of a run → an answer to the user: no memory left, no room on a disk.

Of an allocator's error: phase of the run, bytes planned, held and asked for, remedies.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forge_accel
import forge_dist
from forge._error_chain import as_error, error_chain
from forge._errors import OutOfMemoryError
from forge.memory._memory_plan import size
from forge.run._memory import FILE
from forge.run._run_directory import NoDirectory, RunDirectory, name_for_good
from forge.saving._hashes import NO_THREAD
from forge.saving._room import no_room
from forge.settings._settings import flat_fields

_PHASES = (
    ("forge_dist/verifying", "", "the export's comparison with the model in memory", "export"),
    ("forge_dist/exporting", "", "the export", "export"),
    ("forge_dist/checkpoints", "", "the saving of a full state", "saving"),
    ("forge_algos/training/_evaluate", "", "an evaluation", "evaluation"),
    ("forge_dist/strategies", "backward", "a backward pass", "step"),
    ("forge_algos/_parallel", "backward", "a backward pass", "step"),
    ("forge_dist/strategies", "step", "the optimizer's step", "step"),
    ("forge_algos/training/_train", "", "a forward pass", "step"),
    ("forge_dist/loading", "", "the loading of the model", None),
)
"""Part of a file's path, name of a function, phase in words, and the memory plan's phase; the first that fits counts."""


@contextmanager
def explained(s: Any, out: RunDirectory | NoDirectory, ranks: forge_dist.Ranks) -> Iterator[None]:
    """Raise errors of the block as those that say what to do.

    The other ranks are told the same of an error of the first one: any rank's message may be the one that a user sees.

    Args:
        s: settings of the run.
        out: its directory.
        ranks: its ranks.

    """

    def answer(error: Exception) -> Exception:
        begun = out.published or not ranks.is_first
        return out_of_memory(error, s, out.path) or no_room(error, out.path, begun=begun) or error

    def told(error: BaseException) -> BaseException:
        found = answer(error) if isinstance(error, Exception) else as_error(error) if isinstance(error, SystemExit) else error
        name_for_good(found, out.path)
        return found

    ranks.explain = told
    try:
        yield
    except SystemExit as error:
        # A rank that ends with status 0 looks finished, and waits for the others, who wait for it.
        raise as_error(error) from error
    except Exception as error:
        if (found := answer(error)) is error:
            raise
        raise found from error


def out_of_memory(error: Exception, s: Any, path: Path) -> OutOfMemoryError | None:
    """Return the error of a run that has no memory left; None where an error is another.

    Args:
        error: what ended the run.
        s: settings of the run.
        path: its directory.

    """
    machine = forge_accel.accelerator(s.device.device)
    link = next((each for each in error_chain(error) if machine.is_out_of_memory(each)), None)
    if link is None:
        return None
    words, phase = _phase_of(link)
    asked, held, planned = forge_accel.asked_bytes(link), machine.held_bytes(), _planned(path, phase)
    figures = [f"{size(asked)} were asked for"] if asked is not None else []
    figures += [f"{size(held)} held"] if held is not None else []
    figures += [f"{size(planned)} planned for this phase"] if planned is not None else []
    if NO_THREAD in str(link):
        figures.append("no thread could be started, as also where `ulimit -u` or a container allows no process more")
    return OutOfMemoryError(
        f"out of memory in {words} on {machine.machine}: {', '.join(figures) or 'it does not say how much was asked for'}. "
        f"{_remedy(s, phase)}"
    )


def _phase_of(error: BaseException) -> tuple[str, str | None]:
    """Find the phase by the files and functions that the error came through."""
    frames = [(frame.filename.replace("\\", "/"), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    for part, function, words, phase in _PHASES:
        if any(part in file and function in ("", name) for file, name in frames):
            return words, phase
    return "the preparation of the run", None


def _planned(path: Path, phase: str | None) -> int | None:
    """Read what was planned for a phase; None where nothing was."""
    try:
        phases = json.loads((path / FILE).read_text(encoding="utf-8"))["phases"]
        return next((int(each["planned"]) for each in phases if each["name"] == phase), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remedy(s: Any, phase: str | None) -> str:
    """Name up to three settings, not set yet, that lower the memory of a phase most cheaply."""
    tokens = s.plan.max_tokens_per_gpu
    settings = []
    if phase in ("step", "evaluation"):
        settings.append("a lower max_tokens_per_gpu" + (f" (it is {tokens:,})" if tokens else ""))
    if s.strategy.activation_checkpointing == "none" and phase in ("step", None):
        settings.append("activation_checkpointing=full")
    if s.optimizer.optimizer == "adamw":
        settings.append("optimizer=adamw_8bit")
    if s.adapter.adapter in ("none", "osft") and s.adapter.accepts("adapter", "lora"):
        settings.append("adapter=lora")
    names = {field.name for _, field in flat_fields(type(s))}
    length = next(name for name in ("max_seq_len", "block_size", "max_new_tokens") if name in names)
    settings += ["strategy=fsdp2 on several ranks", f"a lower {length}"]
    kept = "What was saved before is whole. " if phase == "export" else ""
    *most, last = settings[:3]
    return f"{kept}Set {', '.join(most)} or {last}; --dry-run says what each takes."
