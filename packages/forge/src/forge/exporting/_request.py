"""Arguments of `forge.export` → a checked request: model, base, target, type."""

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
from forge._near import near
from forge._redact import is_hub_form
from forge.saving._damage import refuse_damaged_export
from forge.saving._directories import last_export, run_values
from forge.settings._elsewhere import made_elsewhere

Format = Literal["hf", "gguf"]
DType = Literal["float32", "float16", "bfloat16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"]
FLOATS = ("float32", "float16", "bfloat16")
"""Types that a directory can have too; the others are those of GGUF files alone."""


@attrs.frozen(kw_only=True)
class ExportRequest:
    """Checked request of an export."""

    run: Path | None
    """Run directory; None for a model of unknown origin."""
    folder: Path
    """Directory that is exported, such as `hf_format/samples_N` of the run."""
    output: Path
    adapter: bool
    merge: bool
    dtype: str
    format: Format
    base: str
    """Directory or hub name of an adapter's base; of a whole model its own directory."""
    trained_for: str | None = None
    """Type that quantization-aware training (`qat`) rounded the run's weights to."""
    task: Any = None
    """Task that the model was trained for, as `forge_dist.directory_task` has it; found by `read`."""

    @classmethod
    def of(
        cls,
        run: str | Path,
        output: str | Path | None,
        *,
        merge: bool,
        dtype: str | None,
        format: str,  # noqa: A002 - what users call it
    ) -> ExportRequest:
        """Check the arguments of `forge.export` before a file is read.

        Raises SettingsError and RunDirectoryError.
        """
        for name, value, known in (("format", format, get_args(Format)), ("dtype", dtype, (None, *get_args(DType)))):
            if value not in known:
                told = f" {maker}" if (maker := name == "dtype" and made_elsewhere(str(value), get_args(DType))) else ""
                raise SettingsError(f"{name}={value!r} is not one of {', '.join(each for each in known if each)}.{told}")
        if dtype is not None and dtype not in FLOATS and format != "gguf":
            raise SettingsError(
                f"dtype={dtype} is a type of GGUF files: set format=gguf, or dtype=float32, float16 or bfloat16."
            )
        if output is not None and not str(output):
            raise SettingsError(
                "output is empty: give the directory to write, or leave it out to have one in the run's exports/."
            )
        if output is not None and Path(output).suffix.lower() == ".gguf":
            wanted = "" if format == "gguf" else ", with format=gguf"
            raise SettingsError(
                f"output={output} is the name of a file, and output a directory, in which the file is written under a name of "
                f"its own, with a model card: give a directory, such as {Path(output).with_suffix('')}{wanted}."
            )
        folder = Path(os.path.abspath(Path(last_export(str(run))).expanduser()))
        given = Path(os.path.abspath(Path(run).expanduser()))
        if (folder / "hf_format").is_dir():
            run_values(folder)  # raises: this is a run whose config.yaml is gone
        if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
            raise SettingsError(
                f"{run}: neither a run directory nor one of a model or an adapter (it holds no config.yaml, config.json or "
                f"adapter_config.json).{near(folder)}"
            )
        of_run = None if given == folder else given
        if of_run is not None:
            run_values(of_run)
        adapter = (folder / "adapter_config.json").is_file()
        if merge and not adapter:
            raise SettingsError(f"merge has no effect: {folder} holds a whole model, and no adapter. Leave it out.")
        if adapter and not merge and format == "gguf":
            raise SettingsError(f"{folder} holds an adapter, and a GGUF file a whole model: set merge=True.")
        base = _base_of(folder, of_run, merge=merge, dtype=dtype) if adapter else str(folder)
        trained_for = None if of_run is None else run_values(of_run).get("qat")
        chosen = dtype or (trained_for if format == "gguf" else None) or _stored_dtype(base if merge else str(folder))
        if output is None and of_run is None:
            raise SettingsError(
                f"output is required: only an export of a run has a directory of its own, and {run} is none. Give the "
                "directory to write."
            )
        target = _target(output, folder, of_run, f"{chosen}{'-merged' * merge}{'-gguf' * (format == 'gguf')}")
        return cls(
            run=of_run,
            folder=folder,
            output=target,
            adapter=adapter,
            merge=merge,
            dtype=chosen,
            format="gguf" if format == "gguf" else "hf",
            base=base,
            trained_for=trained_for,
        )

    def read(self) -> ExportRequest:
        """Read every file that is exported, and return the request with its task.

        Raises SettingsError and RunDirectoryError.
        """
        if self.run is not None:
            refuse_damaged_export(self.run, self.folder)
        task = forge_dist.directory_task(str(self.folder))
        if task == "embedding" and self.format == "gguf":
            raise SettingsError(f"{self.folder} holds an embedding model, which format=gguf does not write. Leave it out.")
        return attrs.evolve(self, task=task)

    @property
    def name(self) -> str:
        """Name of the model in a GGUF file."""
        if self.run is None:
            return Path(self.base).name
        return f"{Path(run_values(self.run)['model_path']).name}-{read_json(self.run / 'run.json').get('verb', 'forge')}"

    def vocabulary(self, tokenizer: Any) -> int:
        """Return how many token ids the model has."""
        if tokenizer is not None:
            return len(tokenizer)
        config = read_json(self.folder / "config.json") or read_json(Path(self.base) / "config.json")
        return int(config.get("vocab_size", 100))


def _base_of(folder: Path, run: Path | None, *, merge: bool, dtype: str | None) -> str:
    """Return directory or hub name of an adapter's base. Raises SettingsError."""
    known = forge_dist.adapter_base(folder)
    base = known.path
    if merge and not Path(os.path.expanduser(base)).is_dir() and not is_hub_form(base):
        raise SettingsError(
            f"{folder}: its base model is gone: adapter_config.json names {base} (base_model_name_or_path), and there is no "
            "such directory. Put the base back, or name there where it lies now."
        )
    if merge and known.quantization is not None and dtype is None:
        raise SettingsError(
            f"{folder} was trained beside a base in 4 or 8 bits, and the merged weights need more: give the dtype (float32, "
            "float16 or bfloat16, with gguf also q8_0 or q4_0)."
        )
    if run is not None:
        known_models, now = read_json(run / "run.json"), forge_dist.model_identity(base)
        # A run with new tokens began with a base of its own.
        began = known_models.get("base_model", known_models.get("model"))
        # A hub name is identified by its name alone: what the Hub holds under it now is not compared.
        if began is not None and Path(base).is_dir() and began != now:
            raise SettingsError(
                f"{run}: the base model in {base} is not the one that this run began with: its config.json or its weights "
                "changed. Put it back."
            )
    return base


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _stored_dtype(place: str) -> str:
    """Return the float type that holds most numbers of a model's or adapter's files."""
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


def _target(output: str | Path | None, folder: Path, run: Path | None, kind: str) -> Path:
    """Return the directory to write. Raises where it lies in what is exported, or exists."""
    if output is None:
        assert run is not None
        target = run / "exports" / f"{folder.name}-{kind}"
    else:
        target = Path(os.path.abspath(Path(output).expanduser()))
    for source in (folder, *([run / "hf_format"] if run is not None else [])):
        if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
            raise SettingsError(f"output={target}: lies within {source}, what is exported. Give a directory elsewhere.")
    if os.path.lexists(target):
        raise RunDirectoryError(
            f"output={target}: exists already, and nothing is written over it. Remove it, or give another one."
        )
    return target
