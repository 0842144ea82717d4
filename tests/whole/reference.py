"""Naive training on samples of token ids and labels: the oracle that every fast path must equal.

Nothing here comes from forge. One unpadded sample at a time goes through `model(input_ids, use_cache=False)` with eager
attention; the loss is a log-softmax over every position, written out; sums over the global batch are divided by its loss-token
count; clipping, AdamW, the schedule and LoRA are written by hand from their papers. This file is not to be made faster.

Dimension letters: `S` tokens in one sample, `V` vocabulary, `D` model width, `B` samples in a global batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

NO_LOSS = -100

Gradients = dict[str, torch.Tensor]


class Sample(NamedTuple):
    """One sample: `labels[i]` is the target at position `i`, predicted from the tokens before it, or -100."""

    input_ids: list[int]
    labels: list[int]
    inputs: Mapping[str, torch.Tensor] = {}
    """What the forward is given beside its ids: a processor's arrays of its images."""


class Step(NamedTuple):
    """Figures of one optimizer step: `loss` in nats per learned token, `grad_norm` before clipping."""

    loss: float
    loss_tokens: int
    grad_norm: float
    learning_rate: float


class Recipe(NamedTuple):
    """The hyper-parameters of a run; `max_grad_norm` 0 turns clipping off."""

    learning_rate: float
    num_steps: int
    warmup_steps: int = 0
    lr_scheduler: str = "cosine"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 0.0


# --- the loss -----------------------------------------------------------------------------------------------------------------


def sample_logits(model: nn.Module, sample: Sample) -> torch.Tensor:
    """Logits[S, V] of one sample by itself: no padding, no neighbour, no cache, no mask, default positions."""
    return model(torch.tensor([sample.input_ids]), use_cache=False, **sample.inputs).logits[0]


def sample_loss(model: nn.Module, sample: Sample) -> tuple[torch.Tensor, int]:
    """The sum of -log p(label) over the labelled positions but the first (nothing precedes it), and their number."""
    logits = sample_logits(model, sample)[:-1]  # position i predicts i + 1
    labels = torch.tensor(sample.labels[1:], dtype=torch.long)
    learned = labels != NO_LOSS
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    log_probabilities = shifted - shifted.exp().sum(dim=-1, keepdim=True).log()
    chosen = log_probabilities.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return -(chosen * learned).sum(), int(learned.sum())


def evaluate(model: nn.Module, samples: Iterable[Sample]) -> tuple[float, int]:
    """Nats per learned token over all samples, and the number of learned tokens; the model is left in the mode it was in."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for sample in samples:
            loss, tokens = sample_loss(model, sample)
            total, count = total + loss.item(), count + tokens
    model.train(was_training)
    return total / count, count


def loss_and_gradients(model: nn.Module, batch: Sequence[Sample]) -> tuple[float, int, Gradients]:
    """The loss of a global batch, its loss-token count, and the gradient of the loss by every trainable parameter's name."""
    model.zero_grad(set_to_none=True)
    total, count = 0.0, 0
    for sample in batch:
        loss, tokens = sample_loss(model, sample)
        loss.backward()  # gradients of sums add up in .grad; the one division comes after the last sample
        total, count = total + loss.item(), count + tokens
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / count
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return total / count, count, gradients


# --- the step -----------------------------------------------------------------------------------------------------------------


def norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean norm of all gradients as one vector."""
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))


def clip(gradients: Gradients, max_norm: float) -> Gradients:
    """Gradients scaled down to `max_norm` where they are longer (Pascanu et al. 2013, Algorithm 1), untouched where not."""
    length = norm(gradients)
    if max_norm == 0 or length <= max_norm:
        return gradients
    return {name: gradient * (max_norm / length) for name, gradient in gradients.items()}


def learning_rate(step: int, recipe: Recipe) -> float:
    """Learning rate of step `step` (counted from 1): a linear warm-up, then the scheduler's curve."""
    if step <= recipe.warmup_steps:
        return recipe.learning_rate * step / recipe.warmup_steps
    # The first step after the warm-up has used up none of the curve.
    progress = (step - 1 - recipe.warmup_steps) / (recipe.num_steps - recipe.warmup_steps)
    curve = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return recipe.learning_rate * curve[recipe.lr_scheduler]


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2), one parameter at a time.

    `decays(name, parameter)` says which parameters the decay touches.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, decays: Callable[[str, torch.Tensor], bool]) -> None:
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.recipe = recipe
        self.decay = {name: recipe.weight_decay if decays(name, p) else 0.0 for name, p in self.parameters.items()}
        self.first = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        self.second = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        self.time = 0

    @torch.no_grad()
    def step(self, gradients: Gradients, rate: float) -> None:
        """One update of every parameter at learning rate `rate`."""
        self.time += 1
        beta1, beta2 = self.recipe.beta1, self.recipe.beta2
        for name, parameter in self.parameters.items():
            gradient = gradients[name]
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient * gradient
            first = self.first[name] / (1 - beta1**self.time)
            second = self.second[name] / (1 - beta2**self.time)
            parameter -= rate * (first / (second.sqrt() + self.recipe.eps) + self.decay[name] * parameter)


# --- LoRA ---------------------------------------------------------------------------------------------------------------------


class LowRankLinear(nn.Module):
    """`x W^T + scaling (x A^T) B^T` with W frozen (Hu et al. 2021, equation 3); A[r, D_in], B[D_out, r] are what learns."""

    def __init__(self, frozen: nn.Linear, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.frozen = frozen
        self.A = nn.Parameter(a.detach().clone())
        self.B = nn.Parameter(b.detach().clone())
        self.scaling = scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[..., D_in] to [..., D_out]."""
        return self.frozen(x) + self.scaling * ((x @ self.A.T) @ self.B.T)


def add_low_rank(model: nn.Module, initial: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scaling: float) -> None:
    """Freeze the model and replace each linear layer in `initial` (name -> (A, B)) by a `LowRankLinear`."""
    model.requires_grad_(False)
    for name, (a, b) in initial.items():
        parent, _, child = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear), f"{name} is no linear layer"
        setattr(model.get_submodule(parent), child, LowRankLinear(layer, a, b, scaling))


# --- the loop -----------------------------------------------------------------------------------------------------------------


def train(
    model: nn.Module,
    batches: Sequence[Sequence[Sample]],
    recipe: Recipe,
    decays: Callable[[str, torch.Tensor], bool],
) -> list[Step]:
    """One optimizer step a global batch, `recipe.num_steps` of them; the model is changed in place."""
    assert len(batches) == recipe.num_steps
    optimizer = AdamW(model, recipe, decays)
    steps = []
    for number, batch in enumerate(batches, start=1):
        loss, count, gradients = loss_and_gradients(model, batch)
        rate = learning_rate(number, recipe)
        optimizer.step(clip(gradients, recipe.max_grad_norm), rate)
        steps.append(Step(loss, count, norm(gradients), rate))
    return steps
