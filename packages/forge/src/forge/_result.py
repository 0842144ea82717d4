"""What a finished run hands back, and the file that says that it is finished."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

import forge_dist

_FILE = "result.json"
BEST = "best"


@attrs.frozen(kw_only=True)
class RunResult:
    """A finished run: where it lies and what it measured. Losses are in nats per learned token, or what the verb's objective says."""

    output_dir: Path
    """The run directory: `config.yaml`, `metrics.jsonl`, `log.txt`, `data/`, `plan/`, `hf_format/`, `full_state/`."""
    model_dir: Path
    """The last export, `hf_format/samples_N`: a plain Hugging Face directory, or a plain PEFT one with `adapter="lora"`."""
    steps: int
    """Optimizer steps made."""
    samples: int
    """Samples trained on, repetitions counted."""
    skipped: int
    """Those of the steps that moved nothing, because their loss or gradient was not finite (`on_nan=skip`)."""
    loss: float
    """Training loss of the last step."""
    eval_before: dict[str, float] | None
    """What was measured on the held-out data before the first step, as metrics.jsonl has it (`eval_loss`, `eval_accuracy`, ...); None
    where nothing was held out."""
    eval_after: dict[str, float] | None
    """The same after the last step, of the model as it was exported (a bfloat16 directory is exported in bfloat16)."""
    best_step: int | None
    """The step after which the held-out figure of `metric_for_best` was best, 0 where nothing was better than before training; with
    `keep_best` that step's model lies in `best_dir`."""
    best_value: float | None
    """That figure."""
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
        """The best model's export, where `keep_best` was asked for."""
        best = self.output_dir / "hf_format" / BEST
        return best if best.is_dir() else None


def write_result(result: RunResult) -> None:
    """Write `result.json` into the run directory: from then on the run is finished. Paths are written relative to it."""
    values = attrs.asdict(result)
    del values["output_dir"]
    values["model_dir"] = str(result.model_dir.relative_to(result.output_dir))
    forge_dist.write_text_atomically(result.output_dir / _FILE, json.dumps(values, indent=2) + "\n")


def read_result(path: Path) -> RunResult:
    """Read the result of the finished run in `path`. Raises FileNotFoundError where it is not finished."""
    values = json.loads((path / _FILE).read_text(encoding="utf-8"))
    return RunResult(output_dir=path, **{**values, "model_dir": path / values["model_dir"]})


def is_finished(path: Path) -> bool:
    """Whether the run in `path` came to its end, and its model is there."""
    return (path / _FILE).exists() and read_result(path).model_dir.is_dir()
