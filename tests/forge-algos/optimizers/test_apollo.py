"""APOLLO and APOLLO-Mini take the steps of arXiv 2412.05270, keep hardly any state, and resume exactly."""

import copy
import math

import pytest
import torch

from forge_algos import SFT, AdapterSettings, OptimizerError, OptimizerSettings, adapt, make_optimizer, schedule, train
from forge_algos._modules import trainable
from forge_algos.optimizers._apollo import Apollo, projection
from forge_algos.optimizers._rounding import rounding_key

from ..experts import E, mixture
from ..oracle import make, pack, samples

RATE, DECAY, BETAS, EPS, EVERY, SEED = 0.01, 0.1, (0.8, 0.7), 1e-3, 3, 5
GIVEN = {
    "learning_rate": RATE,
    "weight_decay": DECAY,
    "beta1": BETAS[0],
    "beta2": BETAS[1],
    "eps": EPS,
    "apollo_update_interval": EVERY,
}


class Paper:
    """Algorithm 1 and the norm-growth limiter, for one matrix of float64, with columns along the larger side."""

    def __init__(self, matrix, number, rank, scale, *, mini):
        self.tall = matrix.shape[0] >= matrix.shape[1]
        self.matrix = matrix.double().T.clone() if self.tall else matrix.double().clone()
        self.number, self.rank, self.mini, self.t, self.before = number, rank, mini, 0, None
        self.scale = len(self.matrix) / rank if scale is None else scale
        self.first = self.second = torch.zeros(rank, self.matrix.shape[1], dtype=torch.float64)

    def step(self, gradient):
        G = gradient.double().T if self.tall else gradient.double()
        key = rounding_key(SEED, self.number, self.t // EVERY)
        P = projection(len(G), self.rank, key, like=torch.empty(0)).double().T
        self.t += 1
        R = P @ G
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * R
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * R**2
        N = self.first / (self.second.sqrt() + EPS)
        factors = (
            [N.norm() / R.norm()] * G.shape[1] if self.mini else [N[:, j].norm() / R[:, j].norm() for j in range(G.shape[1])]
        )
        scaled = G * torch.stack(factors)
        if self.before is not None and scaled.norm() > 1.01 * self.before:
            scaled = scaled / scaled.norm() * 1.01 * self.before
        self.before = scaled.norm()
        rate = RATE * math.sqrt(1 - BETAS[1] ** self.t) / (1 - BETAS[0] ** self.t)
        self.matrix = self.matrix * (1 - RATE * DECAY) - rate * math.sqrt(self.scale) * scaled

    @property
    def moved(self):
        return (self.matrix.T if self.tall else self.matrix).float()


def gradients(parameters, steps):
    """Yield made-up gradients of every parameter, which grow and shrink."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        yield [torch.randn(p.shape, generator=generator) * (1, 0.2, 4, 1.001)[step % 4] for p in parameters]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("apollo", {}),
        ("apollo", {"apollo_rank": 3, "apollo_scale": 2.0}),
        ("apollo_mini", {}),
        ("apollo_mini", {"apollo_rank": 5}),
    ],
)
def test_steps_are_the_papers(name, given):
    """Eight steps of wide, tall, square matrices and of experts are those of the paper's algorithm, each matrix by itself."""
    model = mixture("gpt_oss")
    optimizer = make_optimizer(model, OptimizerSettings(optimizer=name, **GIVEN, **given), seed=SEED)
    moved = [p for group in optimizer.param_groups if group["algorithm"] == "apollo" for p in group["params"]]
    assert {p.dim() for p in moved} == {2, 3}
    number = {id(p): n for n, p in enumerate(trainable(model))}

    def papers(p):
        smaller = min(p.shape[-2:])
        rank = given.get("apollo_rank", 1 if name == "apollo_mini" else max(1, smaller // 4))
        scale = given.get("apollo_scale")
        whole = p.detach().reshape(-1, *p.shape[-2:])
        return [Paper(each, number[id(p)], min(rank, smaller), scale, mini=name == "apollo_mini") for each in whole]

    expected = [papers(p) for p in moved]
    for given_now in gradients(moved, 8):
        for p, gradient, matrices in zip(moved, given_now, expected, strict=True):
            p.grad = gradient
            for matrix, own in zip(matrices, gradient.reshape(-1, *p.shape[-2:]), strict=True):
                matrix.step(own)
        optimizer.step()
    for p, matrices in zip(moved, expected, strict=True):
        torch.testing.assert_close(p.detach().reshape(-1, *p.shape[-2:]), torch.stack([m.moved for m in matrices]))


def test_what_is_apollos_and_what_is_kept_of_it():
    """Matrices of numbered layers are APOLLO's, all else AdamW's; its state is two moments of low rank and a norm."""
    model = make("llama-untied")
    optimizer = make_optimizer(model, OptimizerSettings(optimizer="apollo", weight_decay=DECAY, apollo_rank=3))
    names = {id(p): name for name, p in model.named_parameters()}
    held = {}
    for group in optimizer.param_groups:
        held.setdefault(group["algorithm"], set()).update(names[id(p)] for p in group["params"])
        assert {p.dim() >= 2 for p in group["params"]} == {group["weight_decay"] == DECAY}
    assert held["apollo"] == {n for n in names.values() if n.endswith("proj.weight")}
    assert held["adamw"] == set(names.values()) - held["apollo"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        if name in held["apollo"]:
            kept = sum(value.numel() for value in optimizer.state[p].values() if isinstance(value, torch.Tensor))
            assert kept == 2 * 3 * max(p.shape) + 1


@pytest.mark.parametrize("name", ["apollo", "apollo_mini"])
def test_what_has_no_whole_matrices_is_refused(name):
    """Refused are a model without numbered layers, and an adapter."""
    settings = OptimizerSettings(optimizer=name)
    with pytest.raises(OptimizerError, match=f"optimizer={name}: no numbered layer of the model has a matrix"):
        make_optimizer(torch.nn.Linear(3, 2), settings)
    with pytest.raises(OptimizerError, match=f"optimizer={name} keeps a low-rank state.*an adapter trains"):
        make_optimizer(adapt(make(), AdapterSettings(adapter="lora")).model, settings)


def test_an_expert_without_tokens_is_not_held_back_by_it():
    """A gradient of zeros is no norm to grow from: the expert's next step is as large as another's."""
    stack = torch.nn.Parameter(torch.zeros(E, 6, 8))
    optimizer = Apollo([{"params": [stack]}], lr=RATE, betas=BETAS, eps=EPS)
    gradient = torch.randn(stack.shape, generator=torch.Generator().manual_seed(0))
    for step in range(4):
        stack.grad = gradient.clone()
        if step in (0, 2):
            stack.grad[1] = 0
        before = stack.detach().clone()
        optimizer.step()
        sizes = (stack.detach() - before).norm(dim=(1, 2))
        assert (sizes[1] == 0) == (step in (0, 2))
        assert (sizes[[0, 2]] > 1e-3).all()
        assert step in (0, 2) or sizes[1] > 1e-3


def test_a_state_loaded_within_an_interval_goes_on_to_the_bit():
    """Projections are not saved: they follow from the seed and the step, whatever torch's generator has been asked for."""

    def go(model, optimizer, steps):
        torch.manual_seed(len(steps))
        for number in steps:
            generator = torch.Generator().manual_seed(number)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

    def started():
        model = make()
        return model, make_optimizer(model, OptimizerSettings(optimizer="apollo", **GIVEN), seed=SEED)

    whole, first, second = started(), started(), started()
    go(*whole, range(7))
    go(*first, range(4))
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    go(*second, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(whole[0].parameters(), second[0].parameters(), strict=True))
    other = make()
    go(other, make_optimizer(other, OptimizerSettings(optimizer="apollo", **GIVEN), seed=SEED + 1), range(7))
    assert not all(torch.equal(a, b) for a, b in zip(whole[0].parameters(), other.parameters(), strict=True))


def test_projections_are_normal_and_differ():
    """Variance 1/rank, a normal's fourth moment, singular values of a random matrix; others for each parameter and interval."""
    like = torch.empty(0)
    P = projection(1024, 256, rounding_key(SEED, 7, 0), like=like)
    assert P.mean().abs() < 3e-4
    assert P.var() * 256 == pytest.approx(1, abs=0.01)
    assert (P**4).mean() / P.var() ** 2 == pytest.approx(3, abs=0.06)
    values = torch.linalg.svdvals(P)  # from √(1024/256) - 1 to √(1024/256) + 1 (Marchenko and Pastur)
    assert 0.97 < values[-1] < values[0] < 3.05
    for number, interval in ((8, 0), (7, 1)):
        other = projection(1024, 256, rounding_key(SEED, number, interval), like=like)
        assert ((P * other).mean() * 256).abs() < 0.01


def test_steps_are_about_as_large_as_adamws():
    """By default one rate serves APOLLO's matrices and AdamW's rest: steps differ by less than half after the first ones."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.nn.Parameter(torch.zeros(64, 160))
    sizes = {}
    grads = [torch.randn(whole.shape, generator=generator) for _ in range(20)]
    for name in ("adamw", "channel", "tensor"):
        p = torch.nn.Parameter(whole.detach().clone())
        adam = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8}
        if name == "adamw":
            optimizer = torch.optim.AdamW([p], **adam, weight_decay=0)
        else:
            optimizer = Apollo([{"params": [p]}], **adam, scale_type=name, rank=1 if name == "tensor" else None)
        for gradient in grads:
            before, p.grad = p.detach().clone(), gradient
            optimizer.step()
        sizes[name] = float((p.detach() - before).norm())
    for name in ("channel", "tensor"):
        assert 0.5 < sizes[name] / sizes["adamw"] < 2, sizes


def test_the_loss_falls_as_adamws():
    """At AdamW's rate, whatever the rank: 25 steps on one batch bring the loss down as far, within a tenth of the way."""
    losses = {}
    for name in ("adamw", "apollo", "apollo_mini"):
        model = make()
        settings = OptimizerSettings(optimizer=name, learning_rate=1e-2, lr_scheduler="constant")
        optimizer = make_optimizer(model, settings)
        steps = [[pack(samples((9, 12, 7)))]] * 25
        outputs = train(model, steps, objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, settings, 25))
        losses[name] = [output.loss for output in outputs]
    first, last = losses["adamw"][0], losses["adamw"][-1]
    assert last < first / 2
    for name in ("apollo", "apollo_mini"):
        assert losses[name][-1] < last + (first - last) / 10, losses
