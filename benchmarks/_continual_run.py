"""Runs of continual learning: a sequence of tasks under one method, learning rate and seed, and the accuracy on each task.

`accuracy[t][i]` is the share of held-out words that rule i answers right, letter for letter, after task t. From it come the
average accuracy (the mean of the last row) and the backward transfer (the mean over all tasks but the last of the gain since
they were learned; negative where they were forgotten), as GEM defines them (arXiv 1706.08840, equations 2 and 3). Two more
figures measure what is left of pretraining: the mean loss of held-out text, in nats a character, and the mean accuracy of the
skills.
"""

import contextlib
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

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

AT_ONCE = 64
"""Rows of which whole distributions are held at once."""
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


class Subject(ABC):
    """What is taught: a base model, rows of its tasks, and how a model is scored on them."""

    tasks: str
    """Tag of each task, a letter."""
    data: Any
    """Rows: `rule`, `text` and `batches`, as `_continual_tasks.Data` has them."""
    rows: int
    """Rows of each step."""
    measured: int
    """Held-out rows of each task."""
    kept: int
    """Rows of each earlier task that a method which measures rows is given."""
    fused: bool | None = None
    """Whether one kernel takes AdamW's step, which saves a tenth of a large model's time."""

    @abstractmethod
    def new(self) -> Any:
        """Make a model with the base's weights."""

    @abstractmethod
    def scored(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (logits [K, V], targets [K], row of each [K]) of a batch's K learned tokens."""

    @abstractmethod
    def general(self, random: np.random.Generator) -> list[Batch]:
        """Draw rows of what the base knew."""

    @abstractmethod
    def left(self, model: torch.nn.Module) -> dict[str, float]:
        """Measure what is left of what the base knew: text_loss and skills."""

    def autocast(self) -> Any:
        """Make the context of a forward."""
        return contextlib.nullcontext()

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss of the learned tokens, in nats."""
        logits, targets, _ = self.scored(model, batch)
        return functional.cross_entropy(logits, targets)

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module, batch: Batch) -> float:
        """Return the share of rows whose whole answer is right, as greedy decoding would give it."""
        logits, targets, rows = self.scored(model, batch)
        wrong = torch.zeros(len(batch[0])).index_add_(0, rows, (logits.argmax(-1) != targets).float())
        return float((wrong == 0).float().mean())

    @torch.no_grad()
    def divergence(self, base: torch.nn.Module, model: torch.nn.Module, batch: Batch) -> float:
        """Return KL(base ‖ model) at the learned tokens of a batch, in nats: RL's Razor's predictor of forgetting."""
        total, tokens = 0.0, 0
        for at in range(0, len(batch[0]), AT_ONCE):
            part = batch[0][at : at + AT_ONCE], batch[1][at : at + AT_ONCE]
            p, q = (self.scored(each, part)[0].double().log_softmax(-1) for each in (base, model))
            total, tokens = total + float((p.exp() * (p - q)).sum()), tokens + len(p)
        return total / tokens

    def held(self, task: str) -> Batch:
        """Return the held-out rows of a task, always the same."""
        return self.data.rule(task, self.measured, np.random.default_rng(4), held=True)

    def before(self) -> dict[str, float]:
        """Measure the base: its accuracy on each task, and what is later left of it."""
        model = self.new()
        return {task: self.accuracy(model, self.held(task)) for task in self.tasks} | self.left(model)


def new_model(sizes: Sizes) -> LlamaForCausalLM:
    """Make a Llama with random weights, from torch's random state."""
    shape = {"hidden_size": sizes.width, "intermediate_size": 3 * sizes.width, "num_hidden_layers": sizes.layers}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=VOCABULARY, num_attention_heads=4, max_position_embeddings=64))


def _take(
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    stage: Stage,
    steps: int,
    rate: float,
    weight_decay: float,
    batches: Iterator[list[Batch]],
    begun: Path | None = None,
    *,
    fused: bool | None = None,
) -> None:
    """Train with AdamW and clipping at 1, the rate rising and falling; from the state in `begun`, where it is kept."""
    trained = [p for p in stage.model.parameters() if p.requires_grad]
    optimizer = stage.wrap(torch.optim.AdamW(trained, lr=rate, weight_decay=weight_decay, fused=fused))
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
    _take(Small(data, sizes, {}).loss, Stage(model, dict), steps, rate, 0.5, batches, begun)
    torch.save(model.state_dict(), file)
    begun.unlink(missing_ok=True)
    return model.state_dict()


@attrs.frozen
class Small(Subject):
    """A Llama of a few layers, pretrained here on real text and rules of characters."""

    data: Data
    sizes: Sizes
    base: dict[str, torch.Tensor]
    tasks: str = TASKS
    kept: int = 192

    @property
    def rows(self) -> int:
        """Rows of each step."""
        return self.sizes.rows

    @property
    def measured(self) -> int:
        """Held-out rows of each task."""
        return self.sizes.measured

    def new(self) -> LlamaForCausalLM:
        """Make a model with the base's weights."""
        model = new_model(self.sizes)
        model.load_state_dict(self.base)
        return model

    def scored(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (logits [K, V], targets [K], row of each [K]) of a batch's K learned characters."""
        wanted = batch[1][:, 1:]
        learned = wanted != -100
        return model(batch[0], use_cache=False).logits[:, :-1][learned], wanted[learned], learned.nonzero()[:, 0]

    def general(self, random: np.random.Generator) -> list[Batch]:
        """Draw rows of the pretraining's rules, and a fifth of that of its text."""
        return [self.data.rule(SKILLS + TASKS, self.kept, random), self.data.text(self.kept // 5, random)]

    def left(self, model: torch.nn.Module) -> dict[str, float]:
        """Measure what is left of pretraining: the loss of held-out text, and the accuracy of the skills."""
        with torch.no_grad():
            text = float(self.loss(model, self.data.text(self.measured // 2, np.random.default_rng(1), held=True)))
        skills = self.data.rule(SKILLS, 2 * self.measured, np.random.default_rng(2), held=True)
        return {"text_loss": text, "skills": self.accuracy(model, skills)}

    def before(self) -> dict[str, float]:
        """Measure the base, and where it was shown answers, what it makes of one that is shown."""
        found = super().before()
        if self.sizes.shown_steps:
            shown = self.data.shown(SKILLS + TASKS, self.measured, np.random.default_rng(6))
            found["shown"] = self.accuracy(self.new(), shown)
        return found


def sequence(method: str, rate: float, seed: int, subject: Subject, steps: int) -> dict[str, Any]:
    """Run one cell: the tasks in the seed's order, `steps` of each, each from the plain model of the one before."""
    began, started = time.process_time(), time.perf_counter()
    order = [subject.tasks[k] for k in np.random.default_rng([seed, 3]).permutation(len(subject.tasks))]
    held = {task: subject.held(task) for task in order}
    model, first, matrix, moved = subject.new(), subject.new(), [], []
    for number, task in enumerate(order):
        torch.manual_seed(1000 * seed + number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stage = INFORMED[method](model, subject, order[:number]) if method in INFORMED else METHODS[method](model)
            random = np.random.default_rng([seed, 5, number])
            batches = ([stage.rows(subject.data, batch, random)] for batch in subject.data.batches(task, subject.rows, seed))
            (stage.learn or partial(_take, subject.loss, fused=subject.fused))(stage, steps, rate, 0.0, batches)
            state = stage.finish()
        model = subject.new()
        model.load_state_dict(state)
        moved.append(subject.divergence(first, model, held[task]))
        matrix.append([subject.accuracy(model, held[other]) for other in order])
    final, learned = matrix[-1], [row[k] for k, row in enumerate(matrix)]
    return {
        "method": method,
        "rate": rate,
        "steps": steps,
        "seed": seed,
        "order": "".join(order),
        "accuracy": [[round(a, 4) for a in row] for row in matrix],
        "new_task": float(np.mean(learned)),
        "average": float(np.mean(final)),
        "backward": float(np.mean([now - then for now, then in zip(final[:-1], learned[:-1], strict=True)])),
        "kept": float(np.mean(final[:-1])),
        "kl_base": float(np.mean(moved)),
        **subject.left(model),
        "cpu_seconds": round(time.process_time() - began, 1),
        "seconds": round(time.perf_counter() - started, 1),
    }
