"""A run, or what one exported → a directory to hand on: merged or not, as Hugging Face or as GGUF files, proved, with a model card."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import numpy as np
import yaml

import forge_accel
import forge_data
import forge_dist
from forge._directories import last_export
from forge._errors import RunDirectoryError, SettingsError
from forge._model_card import Exported, model_card

Format = Literal["hf", "gguf"]
DType = Literal["float32", "float16", "bfloat16", "q8_0"]

_ROWS = (5, 17, 33, 64)
"""Lengths in tokens of the rows on which logits are compared."""


def export(
    run: str | Path,
    output: str | Path | None = None,
    *,
    merge: bool = False,
    dtype: DType | None = None,
    format: Format = "hf",  # noqa: A002 - what users call it
) -> Path:
    """Write a model to hand on, loaded back and compared before it is there, with a model card (README.md).

    Args:
        run: A run directory (its last export), or a model or adapter directory.
        output: The directory to write, which must not exist; of a run by default one in its `exports/`.
        merge: Add an adapter's updates to the weights of its base, which makes a plain model of it.
        dtype: What the weights are written as: float32, float16, bfloat16, with gguf also q8_0; by default as they are stored,
            merged ones as those of the base.
        format: hf for a directory that plain transformers (or plain PEFT) loads, gguf for a file that llama.cpp and its kin run.

    Returns:
        The directory, or with gguf the file in it.

    Raises:
        SettingsError, RunDirectoryError: the request is wrong; nothing was written.
        forge_dist.ModelError: an adapter that cannot be merged, a base that is not there or not the one that was trained on, a model or
            tokenizer that GGUF cannot hold.
        forge_dist.ExportError: what was written, or merged, does not compute what it should, or the disk refused it.

    """
    asked = _Asked.of(run, output, merge=merge, dtype=dtype, format=format)
    tokenizer = _tokenizer(asked)
    rows = _rows(asked.vocabulary(tokenizer))
    loaded = forge_dist.merge_adapter(asked.folder, rows, task=asked.task) if merge else None
    model: Any = (
        loaded.model
        if loaded is not None
        else forge_dist.load_trained(str(asked.folder), dtype=forge_accel.float32, device="cpu", task=asked.task)
    )
    proofs = (
        []
        if loaded is None
        else [
            f"Merged: on {loaded.tokens} tokens its logits are those of the adapter beside its base within {loaded.difference:.1e} of the largest."
        ]
    )
    with forge_dist.atomic_directory(asked.output) as folder:
        try:
            if format == "gguf":
                file, proof = _write_gguf(asked, model, tokenizer, rows, folder)
            else:
                file, proof = None, _write_hf(asked, model, tokenizer, rows, folder)
        except forge_dist.ForgeDistError as error:  # it names the place that is there for the while
            raise type(error)(str(error).replace(str(folder), str(asked.output))) from error
        card = Exported(
            run=asked.run,
            folder=asked.folder,
            merged=merge,
            adapter=asked.adapter,
            base=asked.base,
            dtype=asked.dtype,
            file=file,
            proofs=(*proofs, proof),
            architecture=type(model if merge or not asked.adapter else model.get_base_model()).__name__,
        )
        (folder / "README.md").write_text(model_card(card), encoding="utf-8")
    return asked.output if file is None else asked.output / file


@attrs.frozen(kw_only=True)
class _Asked:
    """A request that was found to make sense."""

    run: Path | None
    folder: Path
    output: Path
    adapter: bool
    merge: bool
    dtype: str
    format: Format
    base: str
    """Directory or hub name of the model that was trained; of a whole model its own directory."""
    task: Literal["causal", "reward"]

    @classmethod
    def of(cls, run: str | Path, output: str | Path | None, *, merge: bool, dtype: str | None, format: str) -> _Asked:  # noqa: A002
        """Look at what is asked for. Raises SettingsError and RunDirectoryError."""
        found = last_export(str(run))
        folder, of_run = Path(os.path.abspath(Path(found).expanduser())), Path(os.path.abspath(Path(run).expanduser()))
        if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
            raise SettingsError(
                f"{run}: neither a run directory nor one of a model or an adapter (it holds no config.yaml, config.json or adapter_config.json)."
            )
        for name, value, known in (("format", format, get_args(Format)), ("dtype", dtype, (None, *get_args(DType)))):
            if value not in known:
                raise SettingsError(f"{name}={value!r} is not one of {', '.join(each for each in known if each)}.")
        if dtype == "q8_0" and format != "gguf":
            raise SettingsError("dtype=q8_0 is a type of GGUF files: set format=gguf, or dtype=float32, float16 or bfloat16.")
        adapter = (folder / "adapter_config.json").is_file()
        if merge and not adapter:
            raise SettingsError(f"merge has no effect: {folder} holds a whole model, and no adapter. Leave it out.")
        if adapter and not merge and format == "gguf":
            raise SettingsError(f"{folder} holds an adapter, and a GGUF file a whole model: set merge.")
        base = str(folder)
        if adapter:
            known = forge_dist.adapter_base(folder)
            base = known.path
            if merge and known.quantization is not None and dtype is None:
                raise SettingsError(
                    f"{folder} was trained beside a base in 4 bits, and what those stand for, with its updates, is written in more: say the dtype "
                    "(float32, float16 or bfloat16, with gguf also q8_0)."
                )
        is_run = of_run != folder
        if adapter and is_run:
            _check_run(of_run, base)
        chosen = dtype or _stored_dtype(base if merge else str(folder))
        if output is None and not is_run:
            raise SettingsError(
                f"output: say which directory to write; only an export of a run has a place of its own, and {run} is none."
            )
        kind = "".join((f"-{chosen}", "-merged" if merge else "", "-gguf" if format == "gguf" else ""))
        target = (
            Path(os.path.abspath(Path(output).expanduser()))
            if output is not None
            else of_run / "exports" / f"{folder.name}{kind}"
        )
        if os.path.lexists(target):
            raise RunDirectoryError(
                f"output {target}: exists already, and nothing is written over it. Remove it, or give another one."
            )
        return cls(
            run=of_run if is_run else None,
            folder=folder,
            output=target,
            adapter=adapter,
            merge=merge,
            dtype=chosen,
            format="gguf" if format == "gguf" else "hf",
            base=base,
            task=_task_of(folder),
        )

    @property
    def name(self) -> str:
        """What readers of a GGUF file show."""
        if self.run is None:
            return Path(self.base).name
        values = yaml.safe_load((self.run / "config.yaml").read_text(encoding="utf-8"))
        return f"{Path(str(values['model_path'])).name}-{_json(self.run / 'run.json').get('verb', 'forge')}"

    def vocabulary(self, tokenizer: Any) -> int:
        """How many token ids may be tried."""
        if tokenizer is not None:
            return len(tokenizer)
        config = _json(self.folder / "config.json") or _json(Path(self.base) / "config.json")
        return int(config.get("vocab_size", 100))


def _check_run(run: Path, base: str) -> None:
    """Raise SettingsError where the base is not the model that the run began with."""
    began, now = _json(run / "run.json").get("model"), forge_dist.model_identity(base)
    # What is at a hub name may have changed its place since; its weights are told by forge_base.json.
    if began is not None and Path(base).is_dir() and began != now:
        raise SettingsError(
            f"{run}: the base model in {base} is not the one that this run began with: its config.json or its weights changed. Put it back."
        )


def _task_of(folder: Path) -> Literal["causal", "reward"]:
    architectures = _json(folder / "config.json").get("architectures") or []
    of_rewards = any(str(name).endswith("ForSequenceClassification") for name in architectures)
    return "reward" if of_rewards or _json(folder / "adapter_config.json").get("task_type") == "SEQ_CLS" else "causal"


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _stored_dtype(place: str) -> str:
    """The float type, of those that are written, that holds most numbers of a model's or adapter's files."""
    from safetensors import SafetensorError, safe_open

    if not Path(place).is_dir():
        return str(forge_dist.base_dtype(place)).removeprefix("torch.")
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    found: Counter[str] = Counter()
    for path in sorted(Path(place).glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    tensor = file.get_slice(key)
                    found[str(tensor.get_dtype())] += math.prod(tensor.get_shape())
        except (OSError, SafetensorError) as error:
            raise SettingsError(f"{path} cannot be read: {error}.") from error
    return next((names[kind] for kind, _ in found.most_common() if kind in names), "float32")


def _tokenizer(asked: _Asked) -> Any:
    """What lies beside the model, or beside an adapter's base; None where neither has one."""
    for place in (str(asked.folder), asked.base):
        try:
            return forge_data.load_tokenizer(place)
        except forge_data.TokenizerError as error:
            refused = error
    if asked.format == "gguf":
        raise refused
    return None


def _rows(vocabulary: int) -> list[list[int]]:
    """Rows of token ids drawn from the whole vocabulary, always the same."""
    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, length).tolist() for length in _ROWS]


def _write_hf(asked: _Asked, model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], folder: Path) -> str:
    written = forge_dist.export_model(model, folder / "model", tokenizer=tokenizer, dtype=getattr(forge_accel, asked.dtype))
    check = forge_dist.check_export(model, written, [(row, row) for row in rows])
    for file in sorted(written.iterdir()):
        file.rename(folder / file.name)
    written.rmdir()
    what = "mean reward" if asked.task == "reward" else "loss"
    return (
        f"Read back: {check.tensors} tensors, each the one in memory, written as {asked.dtype}; loaded by plain "
        f"{'PEFT' if asked.adapter and not asked.merge else 'transformers'}, its {what} on {check.loss_tokens} random tokens is "
        f"{check.reloaded:.4f}, {check.in_memory:.4f} in memory."
    )


def _write_gguf(asked: _Asked, model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], folder: Path) -> tuple[str, str]:
    name = asked.name
    file = f"{name}-{asked.dtype}.gguf"
    given: Any = {"tokenizer": tokenizer, "dtype": asked.dtype, "name": name}
    forge_dist.export_gguf(model, folder / file, **given)
    check = forge_dist.check_gguf(model, folder / file, rows, **given)
    return file, (
        f"Read back: {check.tensors} tensors, each the one in memory, matrices written as {asked.dtype}; loaded by transformers from the file, its logits are "
        f"those in memory within {check.difference:.1e} of the largest, and within {check.exact:.1e} with the unrounded weights."
    )
