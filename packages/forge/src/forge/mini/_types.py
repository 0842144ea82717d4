"""Arguments of mini-trainer 0.9: its names, its order, its Python defaults."""

from __future__ import annotations

from enum import Enum
from typing import Any

import attrs

from forge._errors import SettingsError


class TrainingMode(str, Enum):
    """What ends a training."""

    EPOCH = "epoch"
    """After `max_epochs`."""
    STEP = "step"
    """After `max_steps`."""
    TOKEN = "token"  # noqa: S105 - a kind of limit, no secret
    """With the step that reaches `max_tokens` learned tokens."""
    INFINITE = "infinite"
    """Never by itself."""


def _mode(value: object) -> TrainingMode:
    try:
        return value if isinstance(value, TrainingMode) else TrainingMode(str(value).lower())
    except ValueError:
        known = ", ".join(mode.value for mode in TrainingMode)
        raise SettingsError(f"training_mode must be one of {known}, not {value!r}.") from None


@attrs.define
class PretrainingConfig:
    """How documents are cut."""

    block_size: int
    """Tokens of a block."""


@attrs.define
class TorchrunArgs:
    """Processes of a training, and where they meet."""

    nnodes: int = 1
    """Nodes."""
    nproc_per_node: str | int = 1
    """Processes on each node, or "gpu": one for each accelerator."""
    node_rank: int = 0
    """Number of this node, from 0."""
    rdzv_id: str | int = 123
    """Name of the run where the nodes meet."""
    rdzv_endpoint: str | None = None
    """HOST:PORT where the nodes meet; not together with master_addr."""
    master_addr: str | None = None
    """Host of node 0."""
    master_port: int | None = None
    """Port on master_addr."""

    def __attrs_post_init__(self) -> None:
        if self.rdzv_endpoint and self.master_addr:
            raise SettingsError("rdzv_endpoint and master_addr both say where the nodes meet: give one of them.")


@attrs.define
class TrainingArgs:
    """A training: model, data, optimizer, what ends it, what it saves."""

    model_name_or_path: str
    """Model to train."""
    data_path: str
    """Tokenised rows (input_ids, labels), or any other rows that forge reads."""
    batch_size: int
    """Samples in an optimizer step, over all GPUs."""
    max_tokens_per_gpu: int
    """Tokens in a micro-batch."""
    learning_rate: float
    """Highest learning rate."""
    output_dir: str
    """Run directory."""
    num_warmup_steps: int = 0
    """Steps over which the learning rate rises."""
    lr_scheduler: str = "cosine"
    """Schedule, as transformers names it."""
    lr_scheduler_kwargs: dict[str, Any] | None = attrs.field(factory=dict)
    """Arguments of the schedule: min_lr, min_lr_rate, min_lr_ratio, lr_end, power, num_cycles, num_decay_steps."""
    seed: int = 42
    """Seed of everything random."""
    beta1: float = 0.9
    """AdamW's beta1."""
    beta2: float = 0.95
    """AdamW's beta2."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices."""
    use_liger_kernels: bool = False
    """Compute with Liger's kernels (kernels=liger); logits are never held whole in any case."""
    osft: bool = False
    """Train with OSFT."""
    osft_unfreeze_rank_ratio: float | None = None
    """With osft: the share of each target's ranks that is trained."""
    osft_target_patterns: list[str] | None = None
    """With osft: modules to decompose; by default every linear layer but the head."""
    osft_upcast_dtype: str | None = "float32"
    """Only float32: decompositions are computed in it."""
    min_samples_per_checkpoint: int | None = None
    """Export the model after every so many samples."""
    training_mode: TrainingMode = attrs.field(default=TrainingMode.EPOCH, converter=_mode)
    """What ends the training: epoch, step, token or infinite."""
    max_epochs: int = 1
    """With training_mode=epoch: passes over the data."""
    max_steps: int = 0
    """With training_mode=step: optimizer steps."""
    max_tokens: int = 0
    """With training_mode=token: learned tokens over all GPUs."""
    checkpoint_at_epoch: bool = False
    """Export the model at the end of every epoch too."""
    save_final_checkpoint: bool = True
    """Always so: the model is exported at the end."""
    save_dtype: str | None = None
    """Dtype of exports; by default that of the model."""
    train_dtype: str = "float32"
    """Only float32: the dtype of the weights that are trained."""
    wandb_project: str | None = None
    """Project at Weights & Biases, to which the run is then sent."""
    wandb_run_name: str | None = None
    """Name of the run there."""
    wandb_entity: str | None = None
    """User or team there."""
    mlflow_tracking_uri: str | None = None
    """MLflow's server or directory, to which the run is then sent."""
    mlflow_experiment_name: str | None = None
    """Name of the experiment there."""
    mlflow_run_name: str | None = None
    """Name of the run there."""
    validation_split: float = 0.0
    """Share of the rows that is held out."""
    validation_data_path: str | None = None
    """Held-out rows."""
    validation_frequency: int | None = None
    """Measure on the held-out rows every so many steps."""
    validate_at_epoch: bool = False
    """Measure at the end of each epoch too."""
    min_samples_per_validation: int | None = None
    """Measure with the step that reaches so many samples since the last time."""
    validate_at_final: bool = False
    """Always so: held-out rows are measured before and after the training."""
    pretraining_config: PretrainingConfig | None = None
    """Train on documents, cut into blocks."""
    trust_remote_code: bool = False
    """Refused: no code of a model is run."""
    save_best_val_loss: bool = False
    """Export the model whenever the held-out loss is the lowest so far."""
    val_loss_improvement_threshold: float = 0.0
    """Only 0: any lower loss counts."""
    on_demand_checkpointing: bool = False
    """Always so: a signal saves the state, and the same call goes on from it."""
    resume_from_full_state_checkpoint: str | None = None
    """State of forge (full_state/step_N) to go on from, in place of the newest."""
    callbacks: list[Any] | None = None
    """Objects with on_step, on_evaluation or on_end, as forge takes them."""
