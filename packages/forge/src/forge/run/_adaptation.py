"""Adapter settings → the adapted model; of OSFT also its plan in the run directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import forge_algos
import forge_data
import forge_dist
from forge._counted import counted
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.run._starting_model import Start, as_given, given_adapter_named, untrained, with_kept_adapter
from forge.settings._settings import row_tokens
from forge.tasks._media import single_media
from forge.tasks._parts import adapted_parts, freeze_unreached, report_parts
from forge.tasks._task import Task
from forge.tasks.items._items import Items
from forge.tasks.items._media import MediaRow
from forge.tasks.items._samples import Samples

_CALIBRATION_TOKENS = 16_384
"""Tokens on which OSFT measures; more change the second digit of no importance."""
_OTHER_RANK = "set osft_calibration_path to such rows, or osft_rank=uniform"
_OTHER_INIT = "set another init_lora_weights"


def exported_as(task: Task, adaptation: forge_algos.Adaptation) -> dict[str, Any]:
    """Return the arguments with which an adapted model is exported and checked as a plain one."""
    return {"without": (*task.extra_modules, *adaptation.additions), "plain": adaptation.plain}


def adapt_model(
    task: Task,
    s: Any,
    start: Start,
    model: Any,
    tokenizer: Any,
    train: Items,
    root: Path,
    strategy: forge_dist.Strategy,
    autocast: Callable[[], AbstractContextManager[Any]],
    report: Reporter,
    identity: Mapping[str, str],
    media: Sequence[forge_algos.MediaDocument] = (),
) -> forge_algos.Adaptation:
    """Attach the adapter, log what trains, and store what OSFT protects; collective.

    `identity` has the digests of the run's models, by which what was measured of them is known again; `images` are documents
    that have some, where rows do.
    """
    given, s = s, with_kept_adapter(s, start)

    def measure(function: Callable[..., Any], batches: Any, **how: Any) -> Any:
        found = function(model, batches, autocast=autocast, **how)
        # The forward gathered the weights of a divided model, and what is frozen next must be the shards.
        strategy.settle(model)
        return found

    def unreached(document: forge_algos.MediaDocument) -> Sequence[str]:
        with strategy.computing(model):
            return measure(partial(forge_algos.unreached_by_media, device=strategy.device), document)

    if names := freeze_unreached(s, model, media, unreached):
        more = f" and {counted(len(names) - 1, 'others')}" if names[1:] else ""
        report.note(f"parts: {names[0]}{more} stay as they are: no image or clip of the rows reaches them")
    if s.adapter.adapter == "osft":
        adaptation = _adapt_osft(task, s, model, tokenizer, train, root, strategy, measure, report, identity)
    else:
        adaptation = _adapt(task, s, given, start, model, tokenizer, train, measure)
    report.note(as_given("\n".join(adaptation.describe()), given, start), event="adapted")
    report_parts(s, adaptation.model, report)
    if start.new_ids and (layer := untrained(adaptation.model)):
        report.note(f"WARNING: the new tokens' rows of the {layer} stay the mean of the others: it does not train")
    return adaptation


def _adapt(
    task: Task, s: Any, given: Any, start: Start, model: Any, tokenizer: Any, train: Items, measure: Callable[..., Any]
) -> forge_algos.Adaptation:
    """Attach no adapter, or one of PEFT; errors name the adapter_path of the `given` settings."""
    directions = None
    if s.adapter.init_lora_weights == "eva":
        rows = _imitated(task, s, tokenizer, train, "init_lora_weights=eva", _OTHER_INIT)
        batches = list(_few_batches(rows, row_tokens(s)))

        def directions(names: Mapping[str, int]) -> Mapping[str, Any]:
            return measure(forge_algos.eva_directions, batches, ranks=names)

    with given_adapter_named(given, start):
        more = adapted_parts(s, model)
        return forge_algos.adapt(
            model, s.adapter, directions=directions, tokenizer_path=start.path, new_tokens=start.new_ids, **more
        )


def _adapt_osft(
    task: Task,
    s: Any,
    model: Any,
    tokenizer: Any,
    train: Items,
    root: Path,
    strategy: forge_dist.Strategy,
    measure: Callable[..., Any],
    report: Reporter,
    identity: Mapping[str, str],
) -> forge_algos.Adaptation:
    """Attach OSFT, as a resumed run's plan has it; measure what it protects, and store the plan."""
    ranks = strategy.ranks
    folder = root / "osft"
    cache = folder if s.adapter.osft_cache is None else Path(s.adapter.osft_cache)
    before = ranks.first(lambda: _read_plan(folder / "plan.json"))
    importance, moments, rows, batches = None, None, "", []
    # The shares of a run that is resumed are in its plan.
    of_inputs, of_importance = s.adapter.protects == "inputs", s.adapter.osft_rank == "adaptive" and before is None
    if of_inputs or of_importance:
        batches = _calibration(task, s, tokenizer, train, root, ranks)
    if of_importance:

        def importance(targets: Sequence[str]) -> dict[str, float]:
            return measure(forge_algos.osft_importance, batches, targets=targets, parallel=strategy)

    if of_inputs:
        rows = _known_by(batches, identity.get("base_model", identity["model"]))

        def moments(targets: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
            report.note(f"osft_directions=inputs: measuring what {counted(len(targets), 'targets')} are given")
            return measure(forge_algos.osft_moments, batches, targets=targets)

    free = None if before is None else {name: target["free"] for name, target in before.items()}
    kept = set(cache.glob("*.safetensors"))
    adaptation = forge_algos.adapt(
        model, s.adapter, cache=cache, ranks=ranks, importance=importance, moments=moments, rows=rows, free=free
    )
    plan: Any = getattr(adaptation, "plan", {})
    ranks.first(lambda: _write_plan(folder / "plan.json", plan) if before is None else _check_plan(before, plan, cache, kept))
    if before is None and _could_measure(s, plan):
        report.note("osft protects the weights' directions; osft_calibration_path, with rows of what to keep, protects more")
    return adaptation


def frozen_with_adapter(s: Any, model: Any, strategy: forge_dist.Strategy) -> Any:
    """Return a frozen copy of the base with the adapter of `adapter_path`; collective."""
    if s.adapter.adapter_path is None:
        return model
    strategy.settle(model)
    adapted = forge_algos.adapt(model, s.adapter, **adapted_parts(s, model)).model
    return adapted.requires_grad_(requires_grad=False).eval()


def _could_measure(s: Any, plan: Mapping[str, Any]) -> bool:
    """Return whether rows of what to keep could be given, and would protect something else."""
    stacked = any("tensor" in target for target in plan.values())
    given = not s.origins["osft_directions"].startswith(("chosen", "default")) or s.adapter.osft_calibration_path is not None
    if given or stacked or s.strategy.cp_size > 1 or not 0 < s.adapter.unfreeze_rank_ratio < 1:
        return False
    try:
        return attrs.evolve(s.adapter, osft_directions=None, osft_calibration_path="rows.jsonl").protects == "inputs"
    except ValueError:
        return False


def check_projections(s: Any, strategy: forge_dist.Strategy) -> None:
    """Raise SettingsError for adapters that act around each step, under ZeRO."""
    a = s.adapter
    if a.subtracts and s.optimizer.weight_decay and strategy.name.startswith("zero"):
        raise SettingsError(
            f"init_lora_weights={a.init_lora_weights} undoes the decay of what it subtracts after each step, and "
            f"strategy={strategy.name} keeps the weights in flat partitions of its own: set weight_decay=0, or strategy=fsdp2."
        )
    projects = a.adapter == "osft" and (a.osft_rule == "paper" or a.osft_form == "factors")
    if projects and strategy.name.startswith("zero"):
        chosen = "osft_rule=paper" if a.osft_rule == "paper" else "osft_form=factors"
        raise SettingsError(
            f"{chosen} projects gradients and weights around each step, and strategy={strategy.name} keeps both in flat "
            "partitions of its own: set strategy=fsdp2, or osft_rule=strict with osft_form=direct, which needs no projection."
        )


def _read_plan(file: Path) -> dict[str, Any] | None:
    """Read the OSFT plan of a run that is resumed; None where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not found or not all(
            isinstance(target["free"], int) and isinstance(target["bases"], str) for target in found.values()
        ):
            raise ValueError("it holds no targets")
        return found
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{file}: what the run protects cannot be read ({error}). Put it back, or give another ckpt_output_dir."
        ) from error


def _check_plan(before: dict[str, Any], now: dict[str, Any], cache: Path, kept: set[Path]) -> None:
    """Raise SettingsError where singular vectors are not those of the run's plan.

    What was computed anew is removed from the cache.
    """
    other = [name for name in now if name not in before or now[name]["bases"] != before[name]["bases"]]
    if not other:
        return
    for file in set(cache.glob("*.safetensors")) - kept:
        file.unlink()
    more = f" (and {counted(len(other) - 1, 'other targets')})" if other[1:] else ""
    raise SettingsError(
        f"{cache}: the singular vectors of {other[0]}{more} are missing, and computed anew they "
        "are not those that this run began with: they differ by machine and number of threads. Put back the files that it had "
        "(its osft/, or its osft_cache), start it as it was started, or give another ckpt_output_dir."
    )


def _write_plan(file: Path, plan: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    forge_dist.write_text_atomically(file, json.dumps(plan, indent=1) + "\n")


def _calibration(task: Task, s: Any, tokenizer: Any, train: Items, root: Path, ranks: forge_dist.Ranks) -> list[Any]:
    """Return batches of the earlier tasks' rows to measure on.

    Without such rows osft_rank=adaptive measures on this task's.
    They are the same on every rank.
    """
    path = s.adapter.osft_calibration_path
    if path is None:
        return list(_few_batches(_imitated(task, s, tokenizer, train, "osft_rank=adaptive", _OTHER_RANK), row_tokens(s)))
    place = root / "data" / "calibration"
    # As the task's own rows are: in its template, and no longer.
    given: dict[str, Any] = {
        name: getattr(s.data, name, None) for name in ("chat_template", "chat_template_kwargs", "max_seq_len")
    }
    overflow: Any = "truncate" if given["max_seq_len"] else "drop"
    ranks.first(
        lambda: str(
            forge_data.prepare(
                path, tokenizer, place, on_overflow=overflow, media=task.media, progress=False, **given
            ).fingerprint
        )
    )
    rows = single_media(s, tokenizer, Samples(forge_data.TokenStore.open(place)))
    # Several tasks may stand one after the other in the file: a part of each is taken.
    return list(_few_batches(rows, row_tokens(s), spread=True))


def _known_by(batches: Sequence[Any], model: str) -> str:
    """Return the digest of a model, as its identity has it, and of rows that it is measured on."""
    found = hashlib.sha256(model.encode())
    for batch in batches:
        for values in (batch.input_ids, batch.cu_seqlens):
            found.update(f"{len(values)}\n".encode() + np.asarray(values, np.int64).tobytes())
        for document in batch.media_inputs() if isinstance(batch, MediaRow) else ():
            for name, values in sorted(document.items()):
                found.update(f"{name} {values.shape}\n".encode() + np.ascontiguousarray(values).tobytes())
    return found.hexdigest()


def _imitated(task: Task, s: Any, tokenizer: Any, train: Items, setting: str, instead: str) -> Samples:
    """Return the rows that a setting measures on, or raise SettingsError without such."""
    if isinstance(train, Samples):
        return single_media(s, tokenizer, train)
    raise SettingsError(f"{setting} measures on rows to imitate, and forge {task.name} has none: {instead}.")


def _few_batches(items: Samples, most: int, *, spread: bool = False) -> Sequence[Any]:
    """Pack samples, about _CALIBRATION_TOKENS in all, into rows of at most `most` tokens.

    They are the first, or spread evenly over all.
    """
    lengths = items.lengths
    chosen = np.arange(len(lengths))
    if spread and lengths.sum() > _CALIBRATION_TOKENS:
        number = max(1, int(_CALIBRATION_TOKENS / lengths.mean()))
        chosen = np.arange(number) * len(lengths) // number
    batches, held, size, total = [], [], 0, 0
    for index in chosen.tolist():
        length = int(lengths[index])
        if held and (size + length > most or items.media_rows == "single"):
            batches.append(items.batch(held))
            held, size = [], 0
        held.append(index)
        size, total = size + length, total + length
        # What is spread is not cut short: long rows at the beginning would leave out the tasks at the end.
        if total >= _CALIBRATION_TOKENS and not spread:
            break
    return [*batches, items.batch(held)] if held else batches
