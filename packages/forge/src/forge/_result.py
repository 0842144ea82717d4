"""Result of a finished run, and the file result.json that marks the run as finished."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs

import forge_dist
from forge._errors import RunDirectoryError
from forge._sealed import sealed, unsealed

RESULT = "result.json"
BEST = "best"


@attrs.frozen(kw_only=True)
class RunResult:
    """Result of a finished run. Losses are in nats per learned token, or as the objective says."""

    output_dir: Path
    """The run directory: `config.yaml`, `metrics.jsonl`, `log.txt`, `data/`, `plan/`, `hf_format/`, `full_state/`."""
    model_dir: Path
    """The last export, `hf_format/samples_N`: a plain Hugging Face directory, or a plain PEFT one with `adapter="lora"`."""
    steps: int
    """Optimizer steps made."""
    samples: int
    """Samples trained on, repetitions counted."""
    skipped: int = 0
    """Steps that updated nothing, because their loss or gradient was not finite (`on_nan=skip`)."""
    loss: float
    """Training loss of the last step."""
    eval_before: dict[str, float] | None = None
    """Held-out figures before the first step, named as in metrics.jsonl (`eval_loss`, `eval_accuracy`, ...); None without
    held-out data."""
    eval_after: dict[str, float] | None = None
    """Held-out figures after the last step, of the model as exported (a bfloat16 directory is exported in bfloat16)."""
    best_step: int | None = None
    """Step after which the figure of `metric_for_best` was best, 0 where no step was better than none; with `keep_best` its
    model is in `best_dir`."""
    best_value: float | None = None
    """Best held-out figure."""
    stopped_by: str | None = None
    """Setting that ended the run before its last step: `early_stopping_patience` or `stop_at_kl`; None where all steps were
    made."""
    seconds: float
    """Wall-clock time from the first step to the last export, of all starts together."""

    @property
    def eval_loss_before(self) -> float | None:
        """Held-out loss before the first step."""
        return (self.eval_before or {}).get("eval_loss")

    @property
    def eval_loss_after(self) -> float | None:
        """Held-out loss after the last step."""
        return (self.eval_after or {}).get("eval_loss")

    @property
    def best_dir(self) -> Path | None:
        """Export of the best model; None without `keep_best`."""
        best = self.output_dir / "hf_format" / BEST
        return best if best.is_dir() else None


def write_result(result: RunResult) -> None:
    """Write `result.json`, which marks the run as finished; its paths are relative to the run."""
    forge_dist.write_text_atomically(result.output_dir / RESULT, sealed(result_values(result)))


def result_values(result: RunResult) -> dict[str, Any]:
    """Return what result.json holds: null for a figure that is not finite, no number of JSON."""
    values = {
        name: {key: _finite(each) for key, each in value.items()} if isinstance(value, dict) else _finite(value)
        for name, value in attrs.asdict(result).items()
    }
    del values["output_dir"]
    return {**values, "model_dir": str(result.model_dir.relative_to(result.output_dir))}


def read_result(path: Path) -> RunResult:
    """Read the result of the run in `path`.

    Raises:
        RunDirectoryError: result.json is missing or damaged.

    """
    file = path / RESULT
    try:
        values, _ = unsealed(file)
        known = {name: _known(value) if name.startswith("eval_") else value for name, value in values.items()}
        if known["loss"] is None:
            known["loss"] = math.nan
        return RunResult(output_dir=path, **{**known, "model_dir": path / values["model_dir"]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise RunDirectoryError(f"{file}: {why}. `forge repair {path}` says what can be made whole.") from error


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _known(value: Any) -> Any:
    """Return a figure, or figures, with NaN where null was written."""
    if isinstance(value, dict):
        return {name: math.nan if each is None else each for name, each in value.items()}
    return value
