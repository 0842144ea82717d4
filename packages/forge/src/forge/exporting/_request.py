"""What `forge export` is asked for → what it comes to: which model, from where, to where, in which type; or why it makes no sense."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

import forge_dist
from forge._errors import RunDirectoryError, SettingsError
from forge.exporting._redact import is_hub_form
from forge.run._directories import last_export, run_values

Format = Literal["hf", "gguf"]
DType = Literal["float32", "float16", "bfloat16", "q8_0"]


@attrs.frozen(kw_only=True)
class Asked:
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
    def of(cls, run: str | Path, output: str | Path | None, *, merge: bool, dtype: str | None, format: str) -> Asked:  # noqa: A002
        """Look at what is asked for. Raises SettingsError and RunDirectoryError."""
        found = last_export(str(run))
        folder, of_run = Path(os.path.abspath(Path(found).expanduser())), Path(os.path.abspath(Path(run).expanduser()))
        if (folder / "hf_format").is_dir():
            run_values(folder)  # a run whose config.yaml is gone
        if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
            raise SettingsError(
                f"{run}: neither a run directory nor one of a model or an adapter (it holds no config.yaml, config.json or adapter_config.json)."
            )
        for name, value, known in (("format", format, get_args(Format)), ("dtype", dtype, (None, *get_args(DType)))):
            if value not in known:
                raise SettingsError(f"{name}={value!r} is not one of {', '.join(each for each in known if each)}.")
        if dtype == "q8_0" and format != "gguf":
            raise SettingsError("dtype=q8_0 is a type of GGUF files: set format=gguf, or dtype=float32, float16 or bfloat16.")
        if output is not None and not str(output):
            raise SettingsError(
                "output is empty: say which directory to write, or leave it out to have one in the run's exports/."
            )
        adapter = (folder / "adapter_config.json").is_file()
        if merge and not adapter:
            raise SettingsError(f"merge has no effect: {folder} holds a whole model, and no adapter. Leave it out.")
        if adapter and not merge and format == "gguf":
            raise SettingsError(f"{folder} holds an adapter, and a GGUF file a whole model: set merge.")
        base = str(folder)
        if of_run != folder:
            run_values(of_run)
        if adapter:
            known = forge_dist.adapter_base(folder)
            base = known.path
            if merge:
                _check_base_there(folder, base)
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
        _check_target(target, [folder, *([of_run / "hf_format"] if is_run else [])])
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
        return f"{Path(run_values(self.run)['model_path']).name}-{_json(self.run / 'run.json').get('verb', 'forge')}"

    def vocabulary(self, tokenizer: Any) -> int:
        """How many token ids may be tried."""
        if tokenizer is not None:
            return len(tokenizer)
        config = _json(self.folder / "config.json") or _json(Path(self.base) / "config.json")
        return int(config.get("vocab_size", 100))


def _check_run(run: Path, base: str) -> None:
    """Raise SettingsError where the base is not the model that the run began with."""
    began, now = _json(run / "run.json").get("model"), forge_dist.model_identity(base)
    # A hub name is told by its name alone: what the Hub holds under it now is not compared.
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


def _check_base_there(folder: Path, base: str) -> None:
    if not Path(os.path.expanduser(base)).is_dir() and not is_hub_form(base):
        raise SettingsError(
            f"{folder}: its base model is gone: adapter_config.json names {base} (base_model_name_or_path), and there is no such "
            "directory. Put the base back, or name there where it lies now."
        )


def _check_target(target: Path, sources: list[Path]) -> None:
    if any(Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)) for source in sources):
        raise SettingsError(f"output {target}: lies within {sources[-1]}, what is exported. Give a directory elsewhere.")
    if os.path.lexists(target):
        raise RunDirectoryError(
            f"output {target}: exists already, and nothing is written over it. Remove it, or give another one."
        )
