"""The loop takes the naive steps, for every cut."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from forge_algos import (
    SFT,
    AdapterSettings,
    DivergedError,
    OptimizerSettings,
    PackedBatchError,
    adamw,
    adapt,
    schedule,
    train,
)
from forge_algos.training._train import _clip_factor

from ..oracle import distance, gradients, make, naive, pack, samples

LENGTHS = (5, 9, 2, 7, 13, 4, 6)


def settings_of(**changes):
    return OptimizerSettings(**{"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.5, **changes})


def run(model, steps, config=None, num_steps=None):
    config = config or settings_of()
    optimizer = adamw(model, config)
    scheduler = schedule(optimizer, config, num_steps or len(steps))
    return train(model, steps, objective=SFT(), optimizer=optimizer, scheduler=scheduler, max_grad_norm=config.max_grad_norm)


def still(model, steps):
    """Return the outputs of a run whose weights stay, and its gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return list(train(model, steps, objective=SFT(), optimizer=optimizer, scheduler=scheduler, max_grad_norm=0)), gradients(
        model
    )


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_six_steps_equal_the_naive_ones(adapter, accumulation):
    """Loss, gradient norm, learning rate and final weights of 6 steps are the naive ones.
    Full and LoRA, cut into 1, 2 and 5 micro-batches.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        model = make()
        models.append(adapt(model, AdapterSettings(adapter="lora", lora_r=3)).model if adapter == "lora" else model)
    ours, theirs = models
    data = [samples(LENGTHS, seed=step) for step in range(6)]
    # At the default eps a gradient of 1e-7 divided by its own root would turn rounding into a step.
    config = settings_of(eps=1e-3)
    steps = [[pack(step[k::accumulation]) for k in range(accumulation)] for step in data]
    outputs = list(run(ours, steps, config))

    parameters = [p for p in theirs.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    factors = [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * x / 4)) for x in range(4))]
    for output, step, factor in zip(outputs, data, factors, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.zero_grad()
        total, count = naive(theirs, step)
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        assert abs(output.loss / (total.item() / count) - 1) < 1e-5
        assert abs(output.grad_norm / norm.item() - 1) < 1e-4
        assert output.learning_rate == pytest.approx(1e-2 * factor)
        assert (output.loss_count, output.tokens, output.samples) == (count, sum(LENGTHS), len(LENGTHS))
        assert output.seconds > 0
    assert [o.step for o in outputs] == [1, 2, 3, 4, 5, 6]
    assert max(o.grad_norm for o in outputs) > 0.5
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


MODEL = make()
EXAMPLES = samples(LENGTHS, seed=3)
WHOLE = still(MODEL, [[pack(EXAMPLES)]])


@settings(max_examples=25)
@given(cut=st.lists(st.integers(0, 4), min_size=len(LENGTHS), max_size=len(LENGTHS)), seed=st.integers(0, 9))
def test_the_cut_changes_nothing(cut, seed):
    """Any partition of a step into micro-batches has the same loss and gradients.
    Empty ones among them, in any order.
    """
    order = np.random.default_rng(seed).permutation(len(LENGTHS))
    micro_batches = [pack([EXAMPLES[i] for i in order if cut[i] == k]) for k in range(5)]
    ((output,), mine), ((expected,), theirs) = still(MODEL, [micro_batches]), WHOLE
    assert abs(output.loss / expected.loss - 1) < 1e-6
    assert abs(output.grad_norm / expected.grad_norm - 1) < 1e-5
    assert distance(mine, theirs) < 1e-5
    assert (output.loss_count, output.tokens, output.samples) == (expected.loss_count, expected.tokens, expected.samples)


def test_the_cut_law_can_fail():
    """A mean of micro-batch means is far off: the comparison can fail."""
    halves = [EXAMPLES[:2], EXAMPLES[2:]]
    means = [float(total.detach()) / count for total, count in (naive(MODEL, half) for half in halves)]
    assert abs(sum(means) / 2 / WHOLE[0][0].loss - 1) > 1e-3


def test_gradients_equal_the_naive_ones():
    """A step leaves the gradient of the mean over its learned tokens on the parameters."""
    MODEL.zero_grad()
    total, count = naive(MODEL, EXAMPLES)
    (total / count).backward()
    assert distance(WHOLE[1], gradients(MODEL)) < 1e-5
    assert abs(WHOLE[0][0].loss / (total.item() / count) - 1) < 1e-6


@pytest.mark.parametrize("accumulation", [1, 3])
def test_nothing_is_clipped_below_the_limit(accumulation):
    """A norm below the limit and a limit of 0 leave gradients alone; the norm is reported."""
    steps = [[pack(EXAMPLES[k::accumulation]) for k in range(accumulation)]]
    results = []
    for limit in (0.0, 1e9, 1e-3):
        model = make()
        (output,) = run(model, steps, settings_of(max_grad_norm=limit))
        results.append((output.grad_norm, gradients(model)))
    free, high, low = results
    assert free[0] == high[0] == low[0]
    assert distance(free[1], high[1]) == 0
    assert float(sum(g.square().sum() for g in low[1].values())) ** 0.5 == pytest.approx(1e-3, rel=1e-3)


def test_a_step_with_nothing_to_learn_moves_nothing():
    """Without loss tokens weights and moments stay, and the schedule advances.
    No decay, no NaN, no warning.
    """
    model = make()
    masked = pack(samples([4, 3], learned=0.0))
    before = [p.detach().clone() for p in model.parameters()]
    outputs = run(model, [[masked, pack([])], [pack(EXAMPLES)]], settings_of(warmup_steps=4), 2)
    first = next(outputs)
    assert (first.loss, first.grad_norm, first.loss_count, first.tokens, first.samples) == (0.0, 0.0, 0, 7, 2)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    second = next(outputs)
    assert second.learning_rate == pytest.approx(1e-2 * 2 / 4)
    assert not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_divergence_stops_before_the_optimizer(where):
    """A NaN loss or gradient names its step and leaves the weights as they were."""
    model = make()
    outputs = run(model, [[pack(EXAMPLES)]] * 3)
    next(outputs)
    parameter = model.model.layers[0].mlp.up_proj.weight
    if where == "gradient":
        parameter.register_hook(lambda grad: grad * float("inf"))
    else:
        parameter.data[0, 0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        DivergedError, match=rf"step 2: the {'loss' if where == 'loss' else 'gradient norm'} is (nan|inf)"
    ) as caught:
        next(outputs)
    assert all(torch.equal(p.nan_to_num(), b.nan_to_num()) for p, b in zip(model.parameters(), before, strict=True))
    assert caught.value.exit_status == 1
    assert isinstance(caught.value, FloatingPointError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_malformed_micro_batch_is_refused_before_the_first_forward():
    """A step's rows are all looked at before any of them is run."""
    model, broken, forwards = make(), pack(EXAMPLES), []
    broken.position_ids = broken.position_ids + 1
    outputs = run(model, [[pack(EXAMPLES)], [pack(EXAMPLES), broken]])
    next(outputs)
    model.register_forward_hook(lambda *_: forwards.append(1))
    with pytest.raises(PackedBatchError, match="anew in every document"):
        next(outputs)
    assert forwards == []


def test_it_is_a_generator_that_cleans_up():
    """Nothing runs before the first next(); closing removes the guard and restores modes."""
    model = make().eval()
    model.model.norm.train()
    outputs = run(model, [[pack(EXAMPLES)]] * 5)
    assert not model._forward_pre_hooks
    next(outputs)
    assert model.training
    packed = {"input_ids": torch.arange(4)[None], "position_ids": torch.tensor([[0, 1, 0, 1]])}
    with pytest.raises(PackedBatchError):
        model(**packed)
    model.eval()
    next(outputs)
    assert model.training
    outputs.close()
    assert not model.training
    assert model.model.norm.training
    model(**packed)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_statistics_of_a_batch_norm(frozen):
    """They stay, and are what it computes with, also where the caller leaves evaluation mode; its weights train."""
    model = make()
    norm = torch.nn.BatchNorm1d(model.config.hidden_size).requires_grad_(not frozen)
    model.get_input_embeddings().register_forward_hook(lambda _, __, out: norm(out.transpose(1, 2)).transpose(1, 2))
    model.add_module("norm_of_inputs", norm)
    outputs = run(model, [[pack(EXAMPLES)]] * 2)
    next(outputs)
    model.eval()
    next(outputs)
    assert (model.training, norm.training) == (True, False)
    assert not norm.num_batches_tracked
    assert not norm.running_mean.any()
    assert norm.bias.any() == (not frozen)


def test_steps_are_not_read_ahead():
    """`steps` may be endless and is not read ahead."""
    drawn = []

    def endless():
        while True:
            drawn.append(1)
            yield [pack(EXAMPLES)]

    outputs = run(make(), endless(), num_steps=10)
    for _ in range(3):
        next(outputs)
    assert len(drawn) == 3


def test_autocast_wraps_the_forward():
    """The context is entered once a micro-batch, and once to choose the head; bfloat16 leaves gradients float32 and near."""
    model, entered = make(), []

    def autocast():
        entered.append(1)
        return torch.autocast("cpu", torch.bfloat16)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    steps = [[pack(EXAMPLES[:3]), pack(EXAMPLES[3:])]]
    (output,) = train(
        model, steps, objective=SFT(), optimizer=optimizer, scheduler=scheduler, max_grad_norm=0, autocast=autocast
    )
    assert len(entered) == 3
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert 0 < abs(output.loss / WHOLE[0][0].loss - 1) < 2e-2
    assert distance(gradients(model), WHOLE[1]) < 0.1


def test_bfloat16_weights_have_a_float32_norm():
    """The norm of bfloat16 gradients is not rounded to bfloat16's three digits."""
    model = make().bfloat16()
    (output,), grads = still(model, [[pack(EXAMPLES)]])
    exact = float(sum(g.double().square().sum() for g in grads.values())) ** 0.5
    assert output.grad_norm == pytest.approx(exact, rel=1e-5)


@pytest.mark.slow
def test_it_learns():
    """Forty steps on the same samples take most of the loss away."""
    outputs = list(
        run(make(), [[pack(EXAMPLES)]] * 40, settings_of(lr_scheduler="constant", warmup_steps=0, max_grad_norm=1.0))
    )
    assert outputs[-1].loss < 0.3 * outputs[0].loss


class Casts(TorchDispatchMode):
    """Counts the casts of the layers' matrices to bfloat16."""

    def __init__(self, model):
        super().__init__()
        self.places = {p.data_ptr() for name, p in model.named_parameters() if "layers" in name and p.dim() > 1}
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.found += args[0].data_ptr() in self.places
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_casts_of_weights_are_made_once_a_step(checkpointed):
    """With `keep_casts` a weight is cast once a step, not in each micro-batch and recomputation; the numbers are the same."""
    data = [
        [pack(part) for part in (samples((5, 9), seed=step), samples((7,), seed=9), samples((4, 6), seed=8))] for step in (0, 1)
    ]
    made, casts = {}, {}
    for keep in (False, True):
        model = make("llama-untied")
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        config = settings_of(warmup_steps=0)
        optimizer = adamw(model, config)
        with Casts(model) as seen:
            outputs = train(
                model,
                data,
                objective=SFT(),
                optimizer=optimizer,
                scheduler=schedule(optimizer, config, 2),
                autocast=lambda: torch.autocast("cpu", torch.bfloat16),
                keep_casts=keep,
            )
            losses = [(output.loss, output.grad_norm) for output in outputs]
        made[keep], casts[keep] = (losses, list(model.parameters())), seen.found
    assert made[True][0] == made[False][0]
    assert all(map(torch.equal, made[True][1], made[False][1]))
    layers = sum("layers" in name and p.dim() > 1 for name, p in model.named_parameters())
    # Two steps of three micro-batches, and what binds the objective asks the model once.
    assert casts == {True: (1 + 2) * layers, False: (1 + 2 * (6 if checkpointed else 3)) * layers}


@settings(deadline=None)
@given(
    st.floats(1e-3, 1e3), st.one_of(st.floats(0, 1e38), st.floats(1e-8, 10), st.sampled_from([0.0, math.inf, math.nan, 1e39]))
)
def test_the_clip_factor_is_torchs(limit, norm):
    """Its bits are those of `clip_grad_norm_` in float32, norms beyond float32's range included."""
    expected = min(1.0, float(limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6)))
    assert _clip_factor(limit, norm) == expected


def test_a_batch_in_the_place_of_a_step():
    """`train(model, [batch, batch])` is answered with the form of a step, and nothing is computed."""
    batch = pack(samples(LENGTHS[:2]))
    for steps in ([batch], [{"input_ids": [1]}]):
        with pytest.raises(PackedBatchError, match=r"a step is a list of micro-batches, and this one is a \w+: give"):
            next(run(make(), steps))


def test_a_step_may_be_a_generator():
    """A step's micro-batches may be packed by a generator: the numbers are those of a list."""
    batches = [pack(samples(LENGTHS[:2])), pack(samples(LENGTHS[2:4]))]
    listed, made = (list(run(make(), steps)) for steps in ([batches, batches], [iter(batches), iter(batches)]))
    assert [output.loss for output in made] == [output.loss for output in listed]
