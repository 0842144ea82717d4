"""Model path, new tokens, adapter path → the model and adapter of a run's start, checked."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import forge_algos
import forge_data
import forge_dist
from forge._counted import counted
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.run._run_directory import RunDirectory
from forge.saving._directories import remove_at_once, run_values, trained_for
from forge.saving._inputs import ADAPTER_FILES
from forge.settings._origin import origin_note
from forge.tasks._task import Task

BASE = "base_model"
"""Folder of a run with new tokens: the model as it starts, with rows for them, and its tokenizer."""
ADAPTER = "adapter"
"""Folder of a run with adapter_path: the adapter as it starts, so that a resume needs no other directory."""

_SHOWN = 8
_BASE_FILE = "forge_base.json"
_DIGEST = re.compile("[0-9a-f]{64}")
_OF_THE_HUB = re.compile(r"(?:(?:https?:/+)?(?:www\.)?huggingface\.co/+|hf:/+)?([\w-][\w.-]*/[\w-][\w.-]*)(?:/tree/[^/]+)?/?")


class Start(NamedTuple):
    """Model that a run starts from; as JSON the same on every rank."""

    path: str
    """Directory or hub name: `model_path`, or the run's own `base_model`."""
    new_ids: tuple[int, ...] = ()
    """Ids of the new tokens, ascending."""
    adapter: str | None = None
    """The run's own copy of the adapter that it goes on from."""


def starting_model(task: Task, s: Any, out: RunDirectory, report: Reporter, *, weights: bool = True) -> tuple[Start, Any]:
    """Check a model against its class and tokenizer, and add new tokens; on the first rank.

    Args:
        task: the verb.
        s: its settings.
        out: the run directory.
        report: gets a line on new tokens, and on weights that are not here.
        weights: whether they must be here; without, the configuration suffices.

    Returns:
        Where the run starts, and the tokenizer.

    Raises:
        forge_dist.ModelError: no such class, weights of another one, or a tokenizer of more ids than the embedding has rows.
        forge_data.TokenizerError: there is no tokenizer, or it cannot read a new token as one.
        SettingsError: the adapter cannot train rows of new tokens.

    """
    path = s.model.model_path
    _tell_rounding(s, report)
    # First, since transformers reads config.json for the tokenizer too: what is wrong there would be said of the tokenizer.
    rows = forge_dist.check_model(path, task=task.model_task(s), weights=weights)
    if not weights and forge_dist.has_no_weights(path):
        report.note(f"{path} holds no weights: shapes are those of its config.json, and no check is made that weights fit it")
    tokenizer = forge_data.load_tokenizer(path)
    added = forge_data.add_tokens(tokenizer, s.model.add_tokens, special=s.model.add_special_tokens)
    # A token that the tokenizer has and the model has no row for is new to the model.
    new = {token: number for token, number in added.ids.items() if token in added.new or number >= rows}
    _check_rows(path, rows, tokenizer, new)
    for token in added.known:
        if token not in new:
            report.note(f"add_tokens: {token!r} is a token already, with id {added.ids[token]}, and keeps its row")
    if not new:
        return Start(path, adapter=_keep_adapter(s, out, report)), tokenizer
    _check_trained(s)
    ids = tuple(sorted(new.values()))
    folder = out.place(BASE)
    if folder.exists() and not (out.has_steps and _is_whole(folder, task.model_task(s))):
        # Of a run without a step, which other tokens may replace; or with links into a model that was moved since then, or
        # without what they led to, as a copy in checkpoint_storage is. It is made again, and compared with its digest.
        remove_at_once(folder)
        folder = out.place(BASE)
    if not folder.exists():
        forge_dist.write_with_token_rows(path, folder, ids, tokenizer=tokenizer, task=task.model_task(s))
    size = forge_dist.check_model(str(folder), task=task.model_task(s))
    grown = f"the embedding grows from {rows:,} to {size:,} rows" if size > rows else f"of the {rows:,} rows some were unused"
    shown = [f"{token!r} {number}" for token, number in new.items()]
    more = ["..."] if len(shown) > _SHOWN else []
    report.note(
        f"new tokens: {len(new):,} ({', '.join([*shown[:_SHOWN], *more])}); {grown}; theirs begin as the mean of the others; "
        f"the run starts from {folder}"
    )
    return Start(str(folder), ids), tokenizer


def _is_whole(folder: Path, model_task: Any) -> bool:
    try:
        forge_dist.check_model(str(folder), task=model_task)
    except (forge_dist.ModelError, OSError):
        return False
    return True


def _check_rows(path: str, rows: int, tokenizer: Any, new: dict[str, int]) -> None:
    """Raise ModelError for a tokenizer with ids beyond the embedding, but for new tokens."""
    over = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows and token not in new}
    if over:
        first = min(over)
        raise forge_dist.ModelError(
            f"model_path {path}: its tokenizer has {counted(len(over), 'tokens')} without a row in the embedding of its "
            "model, which has "
            f"{rows:,} rows: the first is {over[first]!r} with id {first}. Give the tokenizer that belongs to the model, or "
            "name these tokens in add_tokens or add_special_tokens, which adds rows for them."
        )


def _check_trained(s: Any) -> None:
    """Raise SettingsError for an adapter beside which new tokens' rows would not be trained."""
    kind = s.adapter.adapter
    if s.adapter.adapter_path is not None:
        raise SettingsError(
            f"add_tokens with adapter_path {s.adapter.adapter_path}: the adapter has no rows for new tokens. Add them in the "
            "run that begins the adapter, and give that run's base_model as model_path here."
        )
    lora = "take adapter=lora, which trains them beside its matrices"
    if kind == "osft":
        trained = bool({"embeddings", "all"} & set(s.adapter.osft_train_rest))
        remedy = "osft_train_rest=[embeddings, head] trains them, and all other rows"
    elif s.adapter.reads("modules_to_save"):
        trained = s.adapter.reads("init_lora_weights") or s.adapter.modules_to_save is not None
        remedy = f"name the embedding and the head in modules_to_save, or {lora}"
    else:
        trained, remedy = kind == "none", f"{lora}, or adapter=none"
    if not trained:
        raise SettingsError(
            f"add_tokens with adapter={kind}: the new tokens' rows would stay the mean of the others: {remedy}."
        )


def untrained(model: Any) -> str | None:
    """Name the layer in which the new tokens' rows do not train; None where both do."""
    for name, layer in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
        if layer is not None and not any(p.requires_grad for p in layer.parameters()):
            return name
    return None


def with_adapter(s: Any) -> Any:
    """Return settings with the shape of the adapter in `adapter_path`: rank, scale and the like.

    Of a run that is resumed its own copy is read where that directory is gone.

    Raises:
        forge_algos.AdapterError: the directory holds no adapter that the run can go on from.
        SettingsError: another shape was given, or a name on the Hub.

    """
    if s.adapter.adapter_path is None:
        return s
    folder = _where(s)
    if not folder.exists() and (name := _hub_name(s.adapter.adapter_path)) is not None:
        raise SettingsError(
            f"adapter_path {name}: there is no such directory here, and an adapter on the Hub is not fetched by its name: "
            f"`hf download {name} --local-dir DIR` fetches it. Give DIR as adapter_path."
        )
    stored = forge_algos.adaptations.stored_adapter(folder, s.adapter.adapter)
    for name, value in stored.shape.items():
        origin, given = s.origins[name], getattr(s.adapter, name)
        if origin != "default" and not origin.startswith("chosen") and given is not None and given != value:
            raise SettingsError(
                f"{stored.as_setting(name, given)}{origin_note(origin)}: the adapter in adapter_path {stored.folder} has "
                f"{stored.said(name)}. Leave {name} out."
            )
        if value is not None:
            try:
                s = s.resolved(name, value, "that of adapter_path")
            except ValueError as error:
                raise SettingsError(f"adapter_path {stored.folder}: {error}.") from error
    return s


def _hub_name(path: str) -> str | None:
    """Return what of an absolute path may be a name on the Hub; None where nothing may."""
    found = _OF_THE_HUB.fullmatch(path.removeprefix(f"{Path.cwd()}/"))
    return None if found is None else found[1]


def with_kept_adapter(s: Any, start: Start) -> Any:
    """Return settings whose `adapter_path` is the run's own copy."""
    return s if start.adapter is None else s.with_value("adapter", "adapter_path", start.adapter)


def as_given(text: str, s: Any, start: Start) -> str:
    """Name the adapter by the path that was given in a text that names the run's copy."""
    if start.adapter is None or start.adapter == s.adapter.adapter_path:
        return text
    copied = re.compile(re.escape(start.adapter) + r"(?![\w/.-])")
    return copied.sub(lambda _: f"{s.adapter.adapter_path} (the run's copy: {start.adapter})", text)


@contextmanager
def given_adapter_named(s: Any, start: Start) -> Iterator[None]:
    """Let an AdapterError name the adapter by the path that was given."""
    try:
        yield
    except forge_algos.AdapterError as error:
        error.args = tuple(as_given(arg, s, start) if isinstance(arg, str) else arg for arg in error.args)
        raise


def _where(s: Any) -> Path:
    given, run = Path(s.adapter.adapter_path), Path(s.checkpoints.ckpt_output_dir)
    if given.is_dir() or not (run / ADAPTER).is_dir() or not (run / "config.yaml").is_file():
        return given
    # A path that was never there is no other word for the run's copy. A run stands for its last export.
    began = run_values(run).get("adapter_path")
    return run / ADAPTER if began is not None and Path(began).is_relative_to(given) else given


def _keep_adapter(s: Any, out: RunDirectory, report: Reporter) -> str | None:
    """Copy the adapter of `adapter_path` into the run, and return the copy; None without one.

    Raises:
        SettingsError: the run that is resumed began with another one.

    """
    if s.adapter.adapter_path is None:
        return None
    given, own = _where(s), out.place(ADAPTER)
    files = [name for name in (*ADAPTER_FILES, _BASE_FILE) if (given / name).is_file()]
    if own.exists() and given != own:
        if not all(_same_file(given / name, own / name) for name in ADAPTER_FILES):
            if out.has_steps:
                raise SettingsError(
                    f"ckpt_output_dir {out.path}: the adapter in adapter_path {given} is not the one that its run began with, "
                    f"of which {own} is the copy. Put back which of them changed, or give another ckpt_output_dir."
                )
            remove_at_once(own)
    elif not own.exists() and out.resuming and out.has_steps:
        if run_values(out.path).get("adapter_path") is not None:
            raise SettingsError(
                f"ckpt_output_dir {out.path}: the adapter that its run began with is gone from {own}. Put back there what "
                "adapter_path held then, or give another ckpt_output_dir."
            )
        raise SettingsError(
            f"ckpt_output_dir {out.path}: holds a run that did not begin with adapter_path. Leave it out, or give another "
            "ckpt_output_dir."
        )
    if not own.exists():
        with forge_dist.atomic_directory(own) as folder:
            for name in files:
                shutil.copyfile(given / name, folder / name)
    _tell_base(s, given, report)
    return str(own)


def _same_file(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def _tell_base(s: Any, folder: Path, report: Reporter) -> None:
    """Log where the adapter's own record does not show that `model_path` is its base."""
    stored, model = forge_algos.adaptations.stored_adapter(folder, s.adapter.adapter), s.model.model_path
    named, recorded = stored.base, _recorded(folder)
    held = None if recorded is None else recorded.quantization
    was = None if held is None else 8 if held.get("load_in_8bit") else 4
    quantized = forge_algos.adaptations.ADAPTERS[s.adapter.adapter].quantized
    bits = None if not quantized else 8 if s.adapter.quant_type == "int8" else 4
    if was is not None and was != bits:
        here = (
            f"adapter={s.adapter.adapter} has a whole one" if bits is None else f"quant_type={s.adapter.quant_type} has {bits}"
        )
        report.note(f"adapter_path: it was trained beside a base in {was} bits, and {here}")
    if recorded is not None and recorded.identity is not None and not recorded.identity.startswith("hub:"):
        return  # `check_adapter_base` compares the weights
    same = named is None or os.path.realpath(named) == os.path.realpath(model) or Path(named).name == Path(model).name
    if not same:
        report.note(
            f"WARNING: adapter_path {folder} names {named} as its base, and model_path is {model}: nothing shows whether both "
            "have the same weights"
        )


def _tell_rounding(s: Any, report: Reporter) -> None:
    """Log where the run goes on from one with `qat`, without it or for another type."""
    for name, path in (("model_path", s.model.model_path), ("adapter_path", s.adapter.adapter_path)):
        kind = None if path is None else trained_for(path)
        if kind not in (None, s.qat.qat):
            now = "has none" if s.qat.qat is None else f"has qat={s.qat.qat}"
            report.note(
                f"WARNING: {name} {path} was trained with qat={kind}, and this run {now}: its steps move weights without "
                f"regard to how {kind} rounds them. Give qat={kind} to go on for a file of that type"
            )


def _recorded(folder: Path) -> forge_dist.AdapterBase | None:
    """Return what forge recorded of the adapter's base; None where another trainer wrote it."""
    return forge_dist.adapter_base(folder) if (folder / _BASE_FILE).is_file() else None


def check_adapter_base(s: Any, start: Start, identity: str) -> None:
    """Raise SettingsError where the adapter was trained beside other weights.

    Args:
        s: the settings.
        start: the model and the copy of the adapter.
        identity: of the model; of hub names, and before its files were read, it says nothing.

    """
    if start.adapter is None or (recorded := _recorded(Path(start.adapter))) is None:
        return
    digests = [value for value in (recorded.identity, identity) if value is not None and _DIGEST.fullmatch(value)]
    if len(set(digests)) == 2:
        raise SettingsError(
            f"adapter_path {s.adapter.adapter_path}: was trained beside another base than model_path {s.model.model_path} "
            f"({recorded.path}, {digests[0][:12]} then, {digests[1][:12]} now). Give that base as model_path."
        )
