"""A run and tasks of lm-evaluation-harness → scores of its base and its last export."""

from __future__ import annotations

import difflib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forge_accel
import forge_algos
import forge_data
import forge_dist
from forge._errors import ForgeError, RunDirectoryError, SettingsError
from forge._near import near
from forge.reports._report import report
from forge.saving._directories import last_export, run_values
from forge.settings._elsewhere import NEAR
from forge.talking._model import find_model
from forge.talking._rounded import Rounding, load_rounded, rounding_of

BEFORE = "before"
"""Name of the base model's scores; those of an export have its name."""
_HUB_SECONDS = 5.0


def evaluate(
    run: str | Path,
    *,
    tasks: Sequence[str],
    task_dir: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat_template: bool = False,
    after_only: bool = False,
) -> dict[str, dict[str, dict[str, float]]]:
    """Score a run's base model and its last export on tasks of lm-evaluation-harness.

    The scores stand in the run's `evals/`, its report and the model cards of later exports.

    Args:
        run: A run directory.
        tasks: Names of tasks.
        task_dir: A directory of task files (YAML) beside the harness' own; tasks with local data need no network.
        num_fewshot: Examples before each question; by default as the task says.
        limit: Score so many questions of each task only.
        chat_template: Ask by the chat template, as in a conversation.
        after_only: Score the export alone, not the base.

    Returns:
        `before` and the name of the export → task → metric → value.

    Raises:
        RunDirectoryError: there is no such run.
        SettingsError: lm-eval is not installed, a task is unknown or cannot be loaded, or a value is out of range.
        forge_dist.ModelError: a model cannot be loaded.

    """
    path = Path(os.path.abspath(Path(run).expanduser()))
    if not (path / "config.yaml").is_file():
        raise RunDirectoryError(f"{run}: is no run directory (it holds no config.yaml).{near(path)}")
    if not tasks:
        raise SettingsError("tasks is empty: name one or more.")
    for name, value, least in (("num_fewshot", num_fewshot, 0), ("limit", limit, 1)):
        if value is not None and value < least:
            raise SettingsError(f"{name} must be at least {least}, not {value}.")
    if task_dir is not None and not Path(task_dir).expanduser().is_dir():
        raise SettingsError(f"task_dir {task_dir}: there is no such directory.")
    if task_dir is not None:
        _check_syntax(Path(task_dir).expanduser())
    if find_spec("lm_eval") is None:
        raise SettingsError("lm-evaluation-harness is not installed: `pip install 'forge-llm[eval]'`.")
    export = find_model(last_export(str(path)))
    models = {} if after_only else {BEFORE: find_model(str(run_values(path)["model_path"]))}
    models[Path(export).name] = export
    manager = _known_tasks(tasks, task_dir)
    asked = {"num_fewshot": num_fewshot, "limit": limit, "apply_chat_template": chat_template}
    # A model may take minutes to load: data that cannot be had are found before.
    with _data(list(tasks), manager):
        rounding = rounding_of(export)
        found = {name: _score(path, name, model, rounding, list(tasks), manager, asked) for name, model in models.items()}
    try:
        report(path)
    except (ForgeError, OSError) as error:
        print(f"WARNING: report.html could not be renewed: {error}", file=sys.stderr)
    return found


@contextmanager
def _data(tasks: list[str], manager: Any) -> Iterator[None]:
    """Load the data of tasks from what is here, and from the Hub only what is not.

    Without the Hub's answer its clients would ask again for more than a minute for each task.

    Raises:
        SettingsError: the data cannot be had.

    """
    import datasets
    from huggingface_hub import constants

    def set_offline(values: tuple[bool, bool]) -> None:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = values

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    set_offline((True, True))
    try:
        with _failing(tasks):
            try:
                manager.load(tasks)
            except ConnectionError:
                if before[0] or not _hub_answers():
                    raise
                set_offline(before)
                manager.load(tasks)
        yield
    finally:
        set_offline(before)


def _hub_answers() -> bool:
    """Return whether the Hub answers within 5 s."""
    from huggingface_hub import constants, get_session

    reached: list[bool] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
        except Exception:  # noqa: BLE001 - whatever the client and its libraries raise without a network
            reached.append(False)
        else:
            reached.append(True)

    # Looking up a host's address has no time limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_HUB_SECONDS)
    return reached == [True]


@contextmanager
def _failing(tasks: Sequence[str]) -> Iterator[None]:
    """Raise what the harness raises as a SettingsError that names the tasks."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:500]
        raise SettingsError(
            f"tasks {', '.join(tasks)}: lm-evaluation-harness failed: {type(error).__name__}: {reason}. Data that are not here "
            "are fetched from the network; a task with local data needs none (task_dir)."
        ) from error


@contextmanager
def _quiet_wrapper() -> Iterator[None]:
    """Silence the harness' warnings that its model is given loaded, which is what is wanted."""
    log = logging.getLogger("lm_eval.models.huggingface")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _without_git() -> Iterator[None]:
    """Keep the harness from asking git for a commit, which is not kept.

    git prints an error outside a repository.
    """
    evaluator = import_module("lm_eval.evaluator")
    former = getattr(evaluator, "get_git_commit_hash", None)
    evaluator.get_git_commit_hash = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = former  # type: ignore[attr-defined]


def _known_tasks(tasks: Sequence[str], task_dir: str | Path | None) -> Any:
    """Return the harness' index of tasks. Raises SettingsError for one that it does not have."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if task_dir is None else str(Path(task_dir).expanduser()))
    for name in tasks:
        if name not in manager.all_tasks:
            close = difflib.get_close_matches(name, manager.all_tasks, n=1, cutoff=NEAR)
            hint = f" Did you mean {close[0]!r}?" if close else " `lm-eval ls tasks` lists them."
            raise SettingsError(f"tasks: there is no task {name!r}.{hint}")
    return manager


def _check_syntax(folder: Path) -> None:
    """Raise SettingsError for a task file that is no YAML.

    The harness would leave it out without a word.
    """
    import yaml

    for file in sorted(folder.glob("**/*.yaml")):
        try:
            # The syntax alone: tags such as !function are the harness' own.
            yaml.compose(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"task_dir: {file} cannot be read: {' '.join(str(error).split())}") from error


def _score(
    run: Path, name: str, model_path: str, rounding: Rounding, tasks: list[str], manager: Any, asked: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Score one model, and write what was found."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    print(f"scoring {name}: {'; '.join(filter(None, (model_path, rounding.said)))}", file=sys.stderr)
    machine = forge_accel.accelerator()
    device = machine.device.value
    model: Any = load_rounded(model_path, rounding, dtype=machine.dtype("auto").value, device=device)
    forge_algos.name_cache_for_peft(model)
    with _quiet_wrapper():
        measured = HFLM(pretrained=model, tokenizer=forge_data.load_tokenizer(model_path), device=str(device))
    with _failing(tasks), _without_git():
        found = lm_eval.simple_evaluate(model=measured, tasks=tasks, task_manager=manager, log_samples=False, **asked)
    results = {task: _figures(figures) for task, figures in (found or {}).get("results", {}).items()}
    about = {
        "model": Path(model_path).name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "lm_eval": version("lm-eval"),
        **asked,
        **({} if rounding.kind is None else {"rounded_to": rounding.kind}),
        "results": results,
    }
    (run / "evals").mkdir(exist_ok=True)
    forge_dist.write_text_atomically(run / "evals" / f"{name}.json", json.dumps(about, indent=2) + "\n")
    return results


def _figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return a task's numbers by plain names: `acc,none` is acc, `f1,strict` is f1 (strict)."""
    named: dict[str, float] = {}
    for key, value in found.items():
        metric, _, kind = key.partition(",")
        if kind and isinstance(value, (int, float)) and not isinstance(value, bool):
            named[metric if kind == "none" else f"{metric} ({kind})"] = float(value)
    return named


def as_table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Write scores as lines, a task's metric each, the base's before the export's."""
    lines = []
    first = next(iter(found.values()))
    for task, figures in first.items():
        for metric in figures:
            if not metric.partition(" ")[0].endswith("_stderr"):
                values = "  ".join(f"{name} {scores[task][metric]:.4f}" for name, scores in found.items())
                lines.append(f"{task}  {metric}  {values}")
    return "\n".join(lines)
