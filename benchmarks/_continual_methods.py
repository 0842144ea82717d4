"""Methods of continual learning: for each, what trains in one task, what it does around a step, and the resulting plain model.

Every task starts from the plain model of the one before, so a method with singular vectors computes them anew, and LoRA
begins with a new adapter on the merged weights. Nothing is replayed, and the task is not announced in any other way. All
subspace methods leave the same share of each matrix's directions free, `FREE`.
"""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from _continual_tasks import IDS, ROW, SKILLS, TASKS
from transformers import LlamaForCausalLM

import forge_algos
import forge_packing

FREE = 0.25
"""Share of the singular directions that may change; mini-trainer's unfreeze_rank_ratio, PEFT's 1 - effective_rank."""
LORA_RANK = 16


@attrs.frozen
class Stage:
    """One task under one method."""

    model: torch.nn.Module
    """Model to call; its parameters that require a gradient are trained."""
    finish: Callable[[], dict[str, torch.Tensor]]
    """Function that returns the plain model's weights after the last step."""
    before_step: Callable[[], None] = lambda: None
    after_step: Callable[[], None] = lambda: None
    wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer
    rows: Callable[[Any, Any, np.random.Generator], Any] = lambda data, batch, random: batch  # noqa: ARG005 - most take them as is
    """Function (data, the task's batch, random state) that returns what is trained on."""
    adaptation: Any = None
    """What `forge_algos.adapt` returned, where it made the model."""
    learn: Callable[..., None] | None = None
    """Function (stage, steps, rate, weight decay, batches) that trains; None for cross-entropy on the rows."""


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def full(model: LlamaForCausalLM) -> Stage:
    """Train every weight."""
    return Stage(model, lambda: _state(model))


def lora(model: LlamaForCausalLM) -> Stage:
    """Train PEFT's LoRA on every linear layer but the head, merged at the task's end."""
    settings = forge_algos.AdapterSettings(adapter="lora", lora_r=LORA_RANK, lora_alpha=2.0 * LORA_RANK)
    adapted = forge_algos.adapt(model, settings).model
    return Stage(adapted, lambda: _state(adapted.merge_and_unload()))


def peft_osf(model: LlamaForCausalLM) -> Stage:
    """Train PEFT's `osf` on the same layers, merged at the task's end."""
    from peft import OSFConfig, get_peft_model

    adapted = get_peft_model(model, OSFConfig(target_modules="all-linear", effective_rank=1 - FREE))
    return Stage(adapted, lambda: _state(adapted.merge_and_unload()))


def mini_trainer(model: LlamaForCausalLM) -> Stage:
    """Train mini-trainer's model class with its optimizer wrapper; embeddings, head and norms train too, as there."""
    from mini_trainer import osft_utils

    with contextlib.redirect_stdout(io.StringIO()):
        made = osft_utils.create_osft_model_class(LlamaForCausalLM)(
            model.config, osft_config={}, initialize_osft=False, upcast_dtype=torch.float32, output_dtype=torch.float32
        )
        made.load_state_dict(model.state_dict())
        made.osft_config = osft_utils.auto_generate_target_osft_config(
            made, target_patterns=["self_attn.", "mlp."], rank_ratio=1 - FREE
        )
        made.reinitialize_osft(decompose_existing_weights=True)

    def finish() -> dict[str, torch.Tensor]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            saved = made.prepare_state_dict_for_save(_state(made))
        return {name: saved[name] for name in model.state_dict()}

    return Stage(made, finish, wrap=lambda optimizer: osft_utils.optim_wrapper(optimizer, made))


REPLAYED = 0.05
"""Share of the rows that are drawn from the pretraining's."""


def replay(model: LlamaForCausalLM) -> Stage:
    """Train every weight, on rows of which 5 % are the pretraining's: rules as it drew them, and a fifth of text."""

    def rows(data: Any, batch: Any, random: np.random.Generator) -> Any:
        ids, labels = (tensor.clone() for tensor in batch)
        for row in np.flatnonzero(random.random(len(ids)) < REPLAYED):
            old = data.text(1, random) if random.random() < 0.2 else data.rule(SKILLS + TASKS, 1, random)
            wide = max(ids.shape[1], old[0].shape[1])
            ids = torch.nn.functional.pad(ids, (0, wide - ids.shape[1]))
            labels = torch.nn.functional.pad(labels, (0, wide - labels.shape[1]), value=-100)
            ids[row], labels[row] = 0, -100
            ids[row, : old[0].shape[1]], labels[row, : old[1].shape[1]] = old[0][0], old[1][0]
        return ids, labels

    return Stage(model, lambda: _state(model), rows=rows)


TUTOR_RATE = 4e-4
"""Learning rate at which full fine-tuning makes a tutor: it learns 99.6 % of a task."""


def sdft(
    begin: Callable[[LlamaForCausalLM], Stage], model: LlamaForCausalLM, *, tutored: bool = False, **options: Any
) -> Stage:
    """Train as `begin` has it, but by forge's self-distillation on the model's own answers.

    With `tutored` the teacher is a copy that was fully fine-tuned on the task's rows before, and is shown no answer: on-policy
    distillation (GKD, arXiv 2306.13649).
    """
    settings = forge_algos.SDFTSettings(max_new_tokens=ROW // 2 + 1, **options)

    def learn(stage: Stage, steps: int, rate: float, weight_decay: float, batches: Iterator[Any]) -> None:
        from forge_algos.online import GenerateSampler, sample_self, taught_batches

        drawn = [next(batches)[0] for _ in range(steps)]
        tutor = _fine_tuned(model, drawn, weight_decay) if tutored else None
        optimizer, scheduler = _optimized(stage.model, rate, weight_decay, steps)
        average = None if tutored else forge_algos.WeightAverage(optimizer, settings.teacher_rate)
        sampler = GenerateSampler(stage.model, eos_ids=[IDS[";"]], pad_id=0, batch_tokens=8192)

        def taught() -> Iterator[Any]:
            for step, batch in enumerate(drawn):
                asked, shown = [], []
                for whole, learned in _samples(batch):
                    question = whole[: np.flatnonzero(learned != -100)[0]]
                    asked.append(question)
                    shown.append(question if tutored else np.concatenate([whole, question]))
                samples = sample_self(sampler, asked, shown, settings=settings, seed=step)
                yield taught_batches(samples, max_tokens=8192)

        teacher: Any = average.exchanged if average else tutor
        objective = forge_algos.SelfDistill(settings=settings, teacher=teacher)
        more = {"average": average, "adaptation": stage.adaptation}
        for _ in forge_algos.train(
            stage.model, taught(), objective=objective, optimizer=optimizer, scheduler=scheduler, **more
        ):
            pass

    return attrs.evolve(begin(model), learn=learn)


def _fine_tuned(model: LlamaForCausalLM, drawn: Sequence[Any], weight_decay: float) -> LlamaForCausalLM:
    """Return a copy that learned the rows by full fine-tuning."""
    tutor = copy.deepcopy(model).requires_grad_(requires_grad=True)
    optimizer, scheduler = _optimized(tutor, TUTOR_RATE, weight_decay, len(drawn))
    steps = ([forge_packing.collate(_samples(batch))] for batch in drawn)
    for _ in forge_algos.train(tutor, steps, objective=forge_algos.SFT(), optimizer=optimizer, scheduler=scheduler):
        pass
    return tutor


def _optimized(model: torch.nn.Module, rate: float, weight_decay: float, steps: int) -> tuple[Any, Any]:
    """Return AdamW and a rate that rises over a tenth of the steps, and falls."""
    plan = forge_algos.OptimizerSettings(
        learning_rate=rate, weight_decay=weight_decay, lr_scheduler="linear", warmup_steps=max(1, steps // 10), beta2=0.999
    )
    optimizer = forge_algos.make_optimizer(model, plan)
    return optimizer, forge_algos.schedule(optimizer, plan, steps)


def _samples(batch: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (ids, labels) of each row of a batch, without what stands behind its answer."""
    found = []
    for ids, labels in zip(*(tensor.numpy() for tensor in batch), strict=True):
        end = np.flatnonzero(labels != -100)[-1] + 1
        found.append((ids[:end].astype(np.int32), labels[:end].astype(np.int32)))
    return found


def _osft(**options: Any) -> Callable[..., Stage]:
    settings = forge_algos.AdapterSettings(adapter="osft", **{"unfreeze_rank_ratio": FREE, **options})

    def begin(model: LlamaForCausalLM, **measured: Any) -> Stage:
        names = list(model.state_dict())
        adaptation = forge_algos.adapt(model, settings, **measured)

        def finish() -> dict[str, torch.Tensor]:
            state = model.state_dict()
            return {name: adaptation.plain(name, state[name]).detach().clone() for name in names}

        return Stage(adaptation.model, finish, adaptation.before_step, adaptation.after_step, adaptation=adaptation)

    return begin


def protecting_inputs(
    model: LlamaForCausalLM,
    subject: Any,
    earlier: Sequence[str],
    *,
    general_alone: bool = False,
    osft_directions: str = "inputs",
    **options: Any,
) -> Stage:
    """Train OSFT, protecting the largest inputs on rows of what the base knew and of the tasks before.

    With osft_rank=adaptive the importance of layers is measured on the same rows, of osft_directions=weights too.
    """
    random = np.random.default_rng(77)
    drawn = subject.general(random)
    drawn += [] if general_alone else [subject.data.rule(task, subject.kept, random) for task in earlier]
    samples = [sample for batch in drawn for sample in _samples(batch)]
    batches = [forge_packing.collate(samples[at : at + 64]) for at in range(0, len(samples), 64)]
    moments = partial(_moments, model, batches, subject.autocast)
    importance = partial(_importance, model, batches, subject.autocast)
    return _osft(osft_directions=osft_directions, **options)(model, moments=moments, importance=importance)


def _moments(model: LlamaForCausalLM, batches: Sequence[Any], autocast: Any, targets: Any) -> dict[str, torch.Tensor]:
    return forge_algos.osft_moments(model, batches, targets=targets, autocast=autocast)


def _importance(model: LlamaForCausalLM, batches: Sequence[Any], autocast: Any, targets: Sequence[str]) -> dict[str, float]:
    return forge_algos.osft_importance(model, batches, targets=targets, autocast=autocast)


def _by_depth(*free: int) -> tuple[str, ...]:
    return tuple(f"layers.{layer}.*={rank}" for layer, rank in enumerate(free))


METHODS: dict[str, Callable[[LlamaForCausalLM], Stage]] = {
    "full": full,
    "lora": lora,
    "peft-osf": peft_osf,
    "mini-trainer": mini_trainer,
    "strict/direct": _osft(),
    "strict/factors": _osft(osft_form="factors"),
    "paper": _osft(osft_rule="paper"),
    "replay": replay,
    "sdft": partial(sdft, full),
    "sdft, forward": partial(sdft, full, beta=0.0),
    "sdft, direct": partial(sdft, _osft()),
    "on-policy": partial(sdft, full, tutored=True),
    **{f"direct .{100 * free:.0f}": _osft(unfreeze_rank_ratio=free) for free in (0.1, 0.5)},
    **{f"paper .{100 * free:.0f}": _osft(osft_rule="paper", unfreeze_rank_ratio=free) for free in (0.1, 0.5)},
}
INFORMED: dict[str, Callable[..., Stage]] = {
    "inputs": protecting_inputs,
    "inputs .10": partial(protecting_inputs, unfreeze_rank_ratio=0.1),
    "inputs .50": partial(protecting_inputs, unfreeze_rank_ratio=0.5),
    "inputs, paper": partial(protecting_inputs, osft_rule="paper"),
    "inputs, adaptive": partial(protecting_inputs, osft_rank="adaptive"),
    "direct, adaptive": partial(protecting_inputs, osft_directions="weights", osft_rank="adaptive"),
    "paper, adaptive": partial(protecting_inputs, osft_directions="weights", osft_rank="adaptive", osft_rule="paper"),
    "inputs, general": partial(protecting_inputs, general_alone=True),
    "inputs, down_proj 0": partial(protecting_inputs, rank_pattern=("down_proj=0",)),
    "inputs, first less": partial(protecting_inputs, rank_pattern=_by_depth(16, 32, 48)),
    "inputs, last less": partial(protecting_inputs, rank_pattern=_by_depth(48, 32, 16)),
    "inputs, embeddings train": partial(protecting_inputs, osft_train_rest=("embeddings",)),
}
"""Methods that are given what is taught and the tasks before, too: `inputs` is osft_directions=inputs, `general` on rows of the
pretraining alone."""
