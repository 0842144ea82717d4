"""Runs of continual learning: a sequence of tasks under one method, learning rate and seed, and the accuracy on each task.

`accuracy[t][i]` is the share of held-out words that rule i answers right, letter for letter, after task t. From it come the
average accuracy (the mean of the last row) and the backward transfer (the mean over all tasks but the last of the gain since
they were learned; negative where they were forgotten), as GEM defines them (arXiv 1706.08840, equations 2 and 3). Two more
figures measure what is left of pretraining: the mean loss of held-out text, in nats a character, and the mean accuracy of the
skills.
"""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import torch
from _continual_methods import INFORMED, METHODS, Stage
from _continual_tasks import SKILLS, TASKS, VOCABULARY, Data
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

Batch = tuple[torch.Tensor, torch.Tensor]
WARMUP = 0.1
"""Share of the steps in which the rate rises; then it falls linearly to 0."""

KEPT_EVERY = 100
"""Steps of the pretraining after which its state is kept."""


@attrs.frozen(kw_only=True)
class Sizes:
    """Sizes of model, data and runs."""

    width: int = 128
    layers: int = 3
    pretraining_steps: int = 900
    steps: int = 60
    """Steps of each task."""
    rows: int = 24
    """Rows of each step."""
    measured: int = 256
    """Held-out rows of each rule."""
    shown_steps: int = 0
    """Steps after the pretraining of which most rows show an answer before they ask for it, as self-distillation needs."""


def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean loss of the learned characters, in nats."""
    logits = model(batch[0], use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten(), ignore_index=-100)


@torch.no_grad()
def accuracy(model: torch.nn.Module, batch: Batch) -> float:
    """Return the share of rows whose whole answer is right, as greedy decoding would give it."""
    found = model(batch[0], use_cache=False).logits[:, :-1].argmax(-1)
    wanted = batch[1][:, 1:]
    return float(((found == wanted) | (wanted == -100)).all(1).float().mean())


@torch.no_grad()
def divergence(base: torch.nn.Module, model: torch.nn.Module, batch: Batch) -> float:
    """Return KL(base ‖ model) at the learned characters of a batch, in nats: RL's Razor's predictor of forgetting."""
    p, q = (each(batch[0], use_cache=False).logits[:, :-1].double().log_softmax(-1) for each in (base, model))
    return float((p.exp() * (p - q)).sum(-1)[batch[1][:, 1:] != -100].mean())


def new_model(sizes: Sizes) -> LlamaForCausalLM:
    """Make a Llama with random weights, from torch's random state."""
    shape = {"hidden_size": sizes.width, "intermediate_size": 3 * sizes.width, "num_hidden_layers": sizes.layers}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=VOCABULARY, num_attention_heads=4, max_position_embeddings=64))


def _take(
    stage: Stage, steps: int, rate: float, weight_decay: float, batches: Iterator[list[Batch]], begun: Path | None = None
) -> None:
    """Train with AdamW and clipping at 1, the rate rising and falling; from the state in `begun`, where it is kept."""
    trained = [p for p in stage.model.parameters() if p.requires_grad]
    optimizer = stage.wrap(torch.optim.AdamW(trained, lr=rate, weight_decay=weight_decay))
    rising = max(WARMUP * steps, 1)
    first = 0
    if begun is not None and begun.exists():
        state = torch.load(begun, weights_only=True)
        stage.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        for _ in range(first):
            # Drawn again and left: the rows that follow are those of a run that was not stopped.
            next(batches)
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / rising, (steps - step) / (steps - rising + 1))
        optimizer.zero_grad()
        for batch in next(batches):
            loss(stage.model, batch).backward()
        stage.before_step()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        stage.after_step()
        if begun is not None and (step + 1) % KEPT_EVERY == 0:
            state = {"model": stage.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, begun.with_suffix(".new"))
            begun.with_suffix(".new").replace(begun)


def pretrained(data: Data, sizes: Sizes, file: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Pretrain the base model, or read its weights from `file`.

    A strong weight decay leaves its small singular values small, as long pretraining leaves those of large models.
    """
    if file.exists():
        return torch.load(file, weights_only=True)
    torch.manual_seed(seed)
    model = new_model(sizes)
    if sizes.shown_steps:
        first = attrs.evolve(sizes, shown_steps=0)
        model.load_state_dict(pretrained(data, first, file.with_name("plain.pt"), seed))
    random = np.random.default_rng([seed, 7] if sizes.shown_steps else seed)

    def drawn() -> list[Batch]:
        if sizes.shown_steps:
            return [data.rule(SKILLS + TASKS, 16, random), data.text(6, random), data.shown(SKILLS + TASKS, 32, random)]
        return [data.rule(SKILLS + TASKS, 48, random), data.text(12, random)]

    batches = iter(drawn, None)
    begun = file.with_suffix(".begun")
    steps, rate = (sizes.shown_steps, 1e-3) if sizes.shown_steps else (sizes.pretraining_steps, 3e-3)
    _take(Stage(model, dict), steps, rate, 0.5, batches, begun)
    torch.save(model.state_dict(), file)
    begun.unlink(missing_ok=True)
    return model.state_dict()


def left(model: torch.nn.Module, data: Data, sizes: Sizes) -> dict[str, float]:
    """Measure what is left of pretraining: text_loss and skills."""
    with torch.no_grad():
        text = float(loss(model, data.text(sizes.measured // 2, np.random.default_rng(1), held=True)))
    return {
        "text_loss": text,
        "skills": accuracy(model, data.rule(SKILLS, 2 * sizes.measured, np.random.default_rng(2), held=True)),
    }


def sequence(method: str, rate: float, seed: int, base: dict[str, torch.Tensor], data: Data, sizes: Sizes) -> dict:
    """Run one cell: the tasks in the seed's order, each from the plain model of the one before."""
    began = time.process_time()
    order = [TASKS[k] for k in np.random.default_rng([seed, 3]).permutation(len(TASKS))]
    held = {task: data.rule(task, sizes.measured, np.random.default_rng(4), held=True) for task in order}
    model, first, matrix, moved = new_model(sizes), new_model(sizes), [], []
    model.load_state_dict(base)
    first.load_state_dict(base)
    for number, task in enumerate(order):
        torch.manual_seed(1000 * seed + number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stage = INFORMED[method](model, data, order[:number]) if method in INFORMED else METHODS[method](model)
            random = np.random.default_rng([seed, 5, number])
            batches = ([stage.rows(data, batch, random)] for batch in data.batches(task, sizes.rows, seed))
            (stage.learn or _take)(stage, sizes.steps, rate, 0.0, batches)
            state = stage.finish()
        model = new_model(sizes)
        model.load_state_dict(state)
        moved.append(divergence(first, model, held[task]))
        matrix.append([accuracy(model, held[other]) for other in order])
    final, learned = matrix[-1], [row[k] for k, row in enumerate(matrix)]
    return {
        "method": method,
        "rate": rate,
        "steps": sizes.steps,
        "seed": seed,
        "order": "".join(order),
        "accuracy": [[round(a, 4) for a in row] for row in matrix],
        "new_task": float(np.mean(learned)),
        "average": float(np.mean(final)),
        "backward": float(np.mean([now - then for now, then in zip(final[:-1], learned[:-1], strict=True)])),
        "kept": float(np.mean(final[:-1])),
        "kl_base": float(np.mean(moved)),
        **left(model, data, sizes),
        "cpu_seconds": round(time.process_time() - began, 1),
    }
