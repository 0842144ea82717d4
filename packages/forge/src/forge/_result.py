"""What a finished run hands back."""

from __future__ import annotations

from pathlib import Path

import attrs


@attrs.frozen(kw_only=True)
class RunResult:
    """A finished run: where it lies and what it measured. Losses are in nats per learned token."""

    output_dir: Path
    """The run directory: `config.yaml`, `metrics.jsonl`, `log.txt`, `data/`, `plan/`, `hf_format/`."""
    model_dir: Path
    """The last export, `hf_format/samples_N`: a plain Hugging Face directory, or a plain PEFT one with `adapter="lora"`."""
    steps: int
    """Optimizer steps made."""
    samples: int
    """Samples trained on, repetitions counted."""
    loss: float
    """Training loss of the last step."""
    eval_loss_before: float | None
    """Held-out loss before the first step; None where nothing was held out."""
    eval_loss_after: float | None
    """Held-out loss after the last step, of the model as it was exported (a bfloat16 directory is exported in bfloat16);
    None where nothing was held out."""
    seconds: float
    """Wall-clock time from the first step to the last export."""
