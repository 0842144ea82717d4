"""Loss parity: every fast path equals the naive reference, one unpadded sample at a time, in fp32.

The loss within 1e-6 relative, every parameter's gradient within 1e-5 of its norm; then six optimizer steps in a row.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st

import forge_accel
import forge_algos
import forge_packing

from ..lanes import ci_keeps, quick_keeps
from . import reference, tiny
from .wiring import ATTENTIONS, CPU, FLOAT32, SCALING, load, plain_name, record, rows, with_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .reference import Gradients, Sample

LOSS, GRADIENT = 1e-6, 1e-5
MOVEMENT = 1e-4  # of a weight's way over six steps, which Adam's division by small numbers leaves noisier than the gradients
MODELS = ("llama-tied", "llama-untied", "qwen3")
ADAPTERS = ("none", "lora")
WAYS = list(product(MODELS, ATTENTIONS, ADAPTERS))
IN_CI = [
    ("llama-tied", "documents", "lora"),
    ("llama-tied", "eager", "none"),
    ("llama-untied", "sdpa", "lora"),
    ("qwen3", "documents", "none"),
    ("qwen3", "sdpa", "none"),
]
"""Each model, attention and adapter, where a test takes long; a packed step, the quick law, has all of them."""
SAMPLES = tiny.ragged()
# Tokens in a row at most, so that the ten samples make that many rows.
ROW_OF = {1: 101, 2: 51, 5: 24}


class Pair(NamedTuple):
    """One model twice, with the same weights: as forge loads it, and for the reference."""

    forge: Any
    plain: Any


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Pair]:
    """(model, attention, adapter) -> a Pair that the tests of this file share, and so must not train."""
    folder = tmp_path_factory.mktemp("models")
    directory = cache(lambda name: tiny.save(name, folder / name))

    @cache
    def plain(name: str, adapter: str) -> Any:
        model = tiny.plain(directory(name))
        if adapter == "lora":
            reference.add_low_rank(model, tiny.low_rank_pairs(with_adapter(load(directory(name), "eager"))), SCALING)
        return model

    @cache
    def both(name: str, attention: str, adapter: str) -> Pair:
        model = load(directory(name), attention)
        return Pair(with_adapter(model) if adapter == "lora" else model, plain(name, adapter))

    return both


@pytest.fixture(scope="module")
def expected() -> Callable[[Any, tuple[int, ...]], tuple[float, int, Gradients]]:
    """(plain model, indices into SAMPLES) -> what the reference makes of them as one global batch, computed once."""
    return cache(lambda model, indices: reference.loss_and_gradients(model, [SAMPLES[index] for index in indices]))


def assert_same(output: Any, gradients: Gradients, wanted: tuple[float, int, Gradients]) -> None:
    """The step's loss, count, gradient norm and every gradient are the reference's."""
    loss, count, wanted_gradients = wanted
    assert output.loss_count == count
    assert output.loss == pytest.approx(loss, rel=LOSS)
    whole = reference.norm(wanted_gradients)
    assert output.grad_norm == pytest.approx(whole, rel=GRADIENT)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        size = wanted_gradients[name].norm().item()
        # Where the true gradient is nothing, as of a query that sees one key, a path may be off by the rounding of the rest.
        allowed = GRADIENT * size if size else 1e-7 * whole
        assert (gradient - wanted_gradients[name]).norm().item() <= allowed, name


def test_every_attention_path_is_covered() -> None:
    """The paths tested here are all that the device settings offer but kernels of GPUs, and `auto` is one of them."""
    offered = set(get_args(get_type_hints(forge_accel.DeviceSettings)["attention"]))
    assert offered == {"auto", *ATTENTIONS, "flash3", "flash4"}
    for kernels in ("flash3", "flash4"):
        with pytest.raises(forge_accel.ForgeAccelError, match=kernels):
            CPU.attention(kernels, FLOAT32)
    assert CPU.attention("auto", FLOAT32).value.name in ATTENTIONS


@pytest.mark.parametrize(
    ("name", "attention", "adapter", "accumulation"),
    quick_keeps(
        [(*way, number) for way, number in zip(WAYS, cycle([1, 2, 5]), strict=False)],
        [(*way, number) for way in WAYS for number in (1, 2, 5)],
    ),
)
def test_a_packed_step_equals_the_reference(pair, expected, name: str, attention: str, adapter: str, accumulation: int) -> None:
    """Ten ragged samples in one, two or five packed rows: the loss and the gradients of the ten taken one by one."""
    models = pair(name, attention, adapter)
    micro_batches = rows(SAMPLES, ROW_OF[accumulation])
    assert len(micro_batches) == accumulation
    (output,), (gradients,) = record(models.forge, [micro_batches])
    assert (output.samples, output.tokens) == (10, 101)
    assert_same(output, gradients, expected(models.plain, tuple(range(10))))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize(("name", "attention", "adapter"), ci_keeps(IN_CI, WAYS))
def test_an_unpacked_step_equals_the_reference(
    pair, expected, name: str, attention: str, adapter: str, accumulation: int
) -> None:
    """One sample a micro-batch, one, two or five of them a step, until all ten samples have come: as the reference has it.

    Steps in which nothing is learned say so and give the optimizer no gradient.
    """
    models = pair(name, attention, adapter)
    steps = [tuple(range(start, start + accumulation)) for start in range(0, 10, accumulation)]
    outputs, seen = record(models.forge, [[forge_packing.collate([SAMPLES[i]]) for i in step] for step in steps])
    idle = [output for output in outputs if output.loss_count == 0]
    assert len(idle) == {1: 3, 2: 1, 5: 0}[accumulation]
    assert all((output.loss, output.grad_norm) == (0.0, 0.0) for output in idle)
    learned = [(output, step) for output, step in zip(outputs, steps, strict=True) if output.loss_count]
    for (output, step), gradients in zip(learned, seen, strict=True):
        assert_same(output, gradients, expected(models.plain, step))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention"), ci_keeps([way[:2] for way in IN_CI if way[0] != "qwen3"], list(product(MODELS, ATTENTIONS)))
)
def test_a_long_row_equals_the_reference(pair, name: str, attention: str) -> None:
    """A row with more learned tokens than are scored at once (some 1,100 against 512), of samples as long as chats are."""
    models = pair(name, attention, "none")
    samples = [tiny.sample(length, 70 + length, slice(length // 12, None)) for length in (250, 201, 3, 249, 130, 1, 222, 177)]
    assert sum(len(sample.input_ids) for sample in samples) > 2 * 512
    wanted = reference.loss_and_gradients(models.plain, samples)
    for max_tokens in (2000, 700):
        (output,), (gradients,) = record(models.forge, [rows(samples, max_tokens)])
        assert_same(output, gradients, wanted)


@st.composite
def cuts(draw: st.DrawFn) -> list[list[int]]:
    """The ten samples in any order, cut into any number of rows, empty ones too."""
    order = draw(st.permutations(range(10)))
    marks = sorted(draw(st.lists(st.integers(0, 10), max_size=6)))
    return [order[start:stop] for start, stop in zip([0, *marks], [*marks, 10], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_do_not_depend_on_the_cut(pair, expected, attention: str) -> None:
    """However a step's samples are ordered and cut into micro-batches, empty ones among them, loss and gradients stay."""
    models = pair("llama-tied", attention, "none")

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(cuts())
    def law(cut: list[list[int]]) -> None:
        micro_batches = [forge_packing.collate([SAMPLES[index] for index in row]) for row in cut]
        (output,), (gradients,) = record(models.forge, [micro_batches])
        assert_same(output, gradients, expected(models.plain, tuple(range(10))))

    law()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention", "adapter"), ci_keeps(IN_CI, WAYS))
def test_an_evaluation_does_not_depend_on_its_batches(pair, name: str, attention: str, adapter: str) -> None:
    """One by one, in five rows, two or one: the reference's mean over all learned tokens, and no gradient is left behind."""
    models = pair(name, attention, adapter)
    loss, count = reference.evaluate(models.plain, SAMPLES)
    one_by_one = [forge_packing.collate([sample]) for sample in SAMPLES]
    for batches in (one_by_one, *(rows(SAMPLES, tokens) for tokens in ROW_OF.values())):
        models.forge.zero_grad(set_to_none=True)
        found = forge_algos.evaluate(models.forge, batches, objective=forge_algos.SFT(), device=CPU.device.value)
        assert found.loss_count == count
        assert found.loss == pytest.approx(loss, rel=LOSS)
        assert all(parameter.grad is None for parameter in models.forge.parameters())


def test_lora_sits_on_every_linear_layer_but_the_head(pair) -> None:
    """By default one A and one B beside each linear layer but lm_head are trained, and nothing else."""
    for name in MODELS:
        plain = pair(name, "eager", "none").plain
        layers = {at for at, module in plain.named_modules() if isinstance(module, torch.nn.Linear) and at != "lm_head"}
        adapted = pair(name, "eager", "lora").forge
        trainable = {plain_name(at) for at, parameter in adapted.named_parameters() if parameter.requires_grad}
        assert trainable == {f"{layer}.{half}" for layer in layers for half in "AB"}


# --- six steps in a row ---

RECIPE = reference.Recipe(
    learning_rate=1e-2, num_steps=6, warmup_steps=2, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-4, max_grad_norm=1.8
)
OPTIMIZER = forge_algos.OptimizerSettings(
    learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-4, max_grad_norm=1.8
)


def longer_data() -> list[Sample]:
    """Twenty ragged samples."""
    more = [(11, 2), (4, 0), (19, 7), (1, 0), (14, 13), (6, 1), (3, 2), (21, 0), (10, 5), (7, 6)]
    return [*SAMPLES, *(tiny.sample(length, 40 + length, slice(first, None)) for length, first in more)]


def run_both(directory: str, attention: str, adapter: str, *, fused: bool, lr_scheduler: Any = "cosine") -> None:
    """Plan, collate and train against the reference on the plan's samples; everything that can be compared is."""
    samples = longer_data()
    batch_plan = forge_packing.plan(
        [len(sample.input_ids) for sample in samples], batch_size=7, max_tokens=40, seed=5, epochs=2
    )
    assert batch_plan.num_steps == RECIPE.num_steps
    assert min(len(batch_plan.micro_batches(step)) for step in range(6)) > 1

    model = load(directory, attention)
    plain = tiny.plain(directory)
    if adapter == "lora":
        model = with_adapter(model)
        reference.add_low_rank(plain, tiny.low_rank_pairs(model), SCALING)
    start = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}

    optimizer_settings = attrs.evolve(OPTIMIZER, lr_scheduler=lr_scheduler)
    optimizer = forge_algos.adamw(model, optimizer_settings, fused=fused)
    outputs = forge_algos.train(
        model,
        ([forge_packing.collate([samples[i] for i in row]) for row in batch_plan.micro_batches(step)] for step in range(6)),
        objective=forge_algos.SFT(),
        optimizer=optimizer,
        scheduler=forge_algos.schedule(optimizer, optimizer_settings, batch_plan.num_steps),
        max_grad_norm=optimizer_settings.max_grad_norm,
        device=CPU.device.value,
        autocast=partial(CPU.autocast, FLOAT32),
    )
    steps = [[samples[i] for i in batch_plan.samples(step)] for step in range(6)]
    recipe = RECIPE._replace(lr_scheduler=lr_scheduler)
    wanted = reference.train(plain, steps, recipe, lambda _name, parameter: parameter.ndim >= 2)

    for number, (output, step) in enumerate(zip(outputs, wanted, strict=True), start=1):
        assert (output.step, output.samples, output.loss_count) == (number, len(steps[number - 1]), step.loss_tokens)
        assert output.learning_rate == pytest.approx(step.learning_rate, rel=1e-12)
        assert output.loss == pytest.approx(step.loss, rel=LOSS)
        assert output.grad_norm == pytest.approx(step.grad_norm, rel=GRADIENT)
    assert max(step.grad_norm for step in wanted) > RECIPE.max_grad_norm > min(step.grad_norm for step in wanted)

    finals = dict(plain.named_parameters())
    trained = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    assert trained.keys() == finals.keys()
    for name, parameter in trained.items():
        if parameter.requires_grad:
            moved = (finals[name] - start[name]).norm().item()
            assert moved > 1e-2 * start[name].norm().item(), f"{name} hardly moved: its comparison would say nothing"
            assert (parameter - finals[name]).norm().item() <= MOVEMENT * moved, name
        else:
            assert torch.equal(parameter, start[name]), f"{name} is frozen and moved"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention", "adapter"), ci_keeps(IN_CI, WAYS))
def test_six_steps_equal_the_reference(tmp_path: Path, name: str, attention: str, adapter: str) -> None:
    """Two epochs of plan, collate and train, with warm-up, cosine, decay and clipping: the reference's run, step by step."""
    run_both(tiny.save(name, tmp_path), attention, adapter, fused=CPU.fused_optimizer.value)


@pytest.mark.slow
@pytest.mark.parametrize("lr_scheduler", ["linear", "constant"])
@pytest.mark.parametrize("fused", [False, True])
def test_six_steps_of_other_schedules_and_optimizer_kernels(tmp_path: Path, fused: bool, lr_scheduler: str) -> None:
    """The other two schedules, with torch's fused and unfused AdamW, make the reference's run too."""
    run_both(tiny.save("llama-tied", tmp_path), "documents", "none", fused=fused, lr_scheduler=lr_scheduler)
