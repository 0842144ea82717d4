"""Document isolation: neighbours in a packed row do not change a sample's logits, on every attention path.

The logits are those that are trained on: the objective's own forward of a batch of forge_packing's, seen by a hook.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forge_accel
import forge_algos
import forge_dist
import forge_packing

from ..lanes import quick_keeps
from . import reference, tiny
from .wiring import ATTENTIONS, CPU, load, with_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .reference import Sample

CLOSE = 2e-6  # logits here are about 2; a leak moves them by about 1
LEAK = 1e-2
SAMPLES = tiny.ragged()
WAYS = quick_keeps(
    [("llama-untied", "documents"), ("llama-tied", "sdpa"), ("qwen3", "eager"), *product(["gemma3-window"], ATTENTIONS)],
    list(product(tiny.CONFIGS, ATTENTIONS)),
)
"""Model and attention: a quick look takes each attention with windows, and without."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """(model, attention) -> the model as forge loads it, shared by the tests of this file."""
    folder = tmp_path_factory.mktemp("models")
    directory = cache(lambda name: tiny.save(name, folder / name))
    return cache(lambda name, attention: load(directory(name), attention))


def trained_logits(model: Any, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Logits[S, V] of each sample of one packed row, from the hidden states that the objective scores."""
    batch = forge_packing.collate(samples)
    seen: list[torch.Tensor] = []
    terms_of = forge_algos.SFT().bind(model, device=CPU.device.value)
    hook = model.get_decoder().register_forward_hook(lambda _module, _args, output: seen.append(output.last_hidden_state))
    with hook, torch.no_grad():
        terms_of(batch, [])
        (hidden,) = seen
        logits = model.get_output_embeddings()(hidden[0])
    return list(logits.split([len(sample.input_ids) for sample in samples]))


def other(sample: Sample) -> Sample:
    """A sample of the same length with every token, and every label, another one."""
    swapped = [3 + (token - 3 + 17) % (tiny.VOCABULARY - 3) for token in sample.input_ids]
    return reference.Sample(
        swapped, [label if label < 0 else token for label, token in zip(sample.labels, swapped, strict=True)]
    )


def solo(model: Any, sample: Sample) -> torch.Tensor:
    """The sample's logits in a plain forward of its own, without a neighbour, a mask or a cache."""
    with torch.no_grad():
        return reference.sample_logits(model, sample)


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_a_sample_does_not_see_its_neighbours(model, name: str, attention: str) -> None:
    """Changing every token of one sample, wherever it stands in the row, leaves every other sample's logits alone."""
    loaded = model(name, attention)
    before = trained_logits(loaded, SAMPLES)
    for changed in range(len(SAMPLES)):
        row = [other(sample) if index == changed else sample for index, sample in enumerate(SAMPLES)]
        after = trained_logits(loaded, row)
        assert (after[changed] - before[changed]).abs().max() > LEAK, "the change itself must show"
        for index in set(range(len(SAMPLES))) - {changed}:
            assert torch.equal(after[index], before[index]), f"sample {changed} shows in sample {index}"


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_a_sample_in_a_row_is_as_it_is_alone(model, name: str, attention: str) -> None:
    """Whatever stands before and after it, a sample's logits are those of plain eager attention on it alone."""
    plain = model(name, "eager")
    for row in (SAMPLES, SAMPLES[::-1], SAMPLES[3:6], SAMPLES[:1]):
        for sample, logits in zip(row, trained_logits(model(name, attention), row), strict=True):
            assert (logits - solo(plain, sample)).abs().max() <= CLOSE


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["mistral-window", "gemma3-window"])
def test_a_sliding_window_slides_within_its_sample(model, name: str, attention: str) -> None:
    """A token sees as far back as the window says, in a packed row too, and a token out of all windows' reach does not show.

    Without this, the two tests above would hold for a path that ignores windows.
    """
    loaded = model(name, attention)
    long = SAMPLES[0]
    changed = reference.Sample([other(long).input_ids[0], *long.input_ids[1:]], long.labels)
    before = trained_logits(loaded, [SAMPLES[2], long, SAMPLES[9]])[1]
    after = trained_logits(loaded, [SAMPLES[2], changed, SAMPLES[9]])[1]
    difference = (after - before).abs().amax(dim=1)
    # Two layers of windows of 4 reach 3 back each; a full layer reaches everywhere.
    reach = 7 if name == "mistral-window" else len(long.input_ids)
    assert (difference[:reach] > LEAK / 10).all()
    assert (difference[reach:] <= CLOSE).all()


EXACT = {
    ("gemma2", "documents"),
    ("gemma2", "eager"),
    ("gpt-oss", "documents"),
    ("llama4", "sdpa"),
    ("llama4", "eager"),
    ("opt", "documents"),
}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", tiny.OTHER_CONFIGS)
def test_a_model_that_cannot_keep_documents_apart_is_refused(tmp_path: Path, name: str, attention: str) -> None:
    """Whatever the architecture, a packed row is scored as its samples one by one, or refused; never wrongly."""
    directory = tiny.save(name, tmp_path)
    samples = [SAMPLES[0], SAMPLES[2], SAMPLES[7], SAMPLES[9]]
    loss, count = reference.evaluate(tiny.plain(directory), samples)
    batch = forge_packing.collate(samples)
    found = refusal = None
    try:
        found = forge_algos.evaluate(load(directory, attention), [batch], objective=forge_algos.SFT(), device=CPU.device.value)
    except (forge_dist.ForgeDistError, forge_accel.ForgeAccelError, forge_algos.ForgeAlgosError) as error:
        refusal = error
    if found is None:
        assert refusal.exit_status == 2
        assert (name.partition(":")[0], attention) not in EXACT, refusal
    else:
        assert found.loss_count == count
        assert found.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("careless", [{}, {"use_cache": True}, {"attention_mask": "ones", "use_cache": False}])
def test_the_leak_that_these_tests_look_for_is_real(model, attention: str, careless: dict[str, Any]) -> None:
    """A packed row with a cache or an all-ones mask does leak in transformers, and these tests detect it.

    When transformers isolates these, this test fails, and the guard may go.
    """
    loaded = model("llama-tied", attention)
    row = inputs_of(SAMPLES)
    arguments = dict(careless)
    if "attention_mask" in arguments:
        arguments["attention_mask"] = torch.ones_like(row["input_ids"])
    with torch.no_grad():
        logits = loaded(input_ids=row["input_ids"], position_ids=row["position_ids"], **arguments).logits[0]
    leaked = logits.split([len(sample.input_ids) for sample in SAMPLES])[-1]
    assert (leaked - solo(loaded, SAMPLES[-1])).abs().max() > LEAK


# --- what a packed row must not come with ---


def inputs_of(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """input_ids[1, T], position_ids[1, T], cu_seq_lens_q[B+1] of the samples' packed row."""
    batch = forge_packing.collate(samples)
    return {
        "input_ids": torch.tensor(batch.input_ids)[None],
        "position_ids": torch.tensor(batch.position_ids)[None],
        "cu_seq_lens_q": torch.tensor(batch.cu_seqlens),
    }


FORBIDDEN = {
    "cache by default": lambda row: {},
    "cache": lambda row: {"use_cache": True},
    "mask": lambda row: {"use_cache": False, "attention_mask": torch.ones_like(row["input_ids"])},
    "bool mask": lambda row: {"use_cache": False, "attention_mask": torch.ones_like(row["input_ids"], dtype=torch.bool)},
}


@pytest.mark.parametrize("known_by", ["position_ids", "cu_seq_lens_q"])
@pytest.mark.parametrize("careless", FORBIDDEN)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_guard_refuses_what_leaks(model, attention: str, careless: str, known_by: str) -> None:
    """Under the guard a packed row with a cache or a 2-D mask raises, in the model and in its decoder."""
    loaded = model("llama-tied", attention)
    row = inputs_of(SAMPLES)
    arguments = {**FORBIDDEN[careless](row), "input_ids": row["input_ids"], known_by: row[known_by]}
    with torch.no_grad(), forge_algos.guard_packed(loaded):
        for module in (loaded, loaded.get_decoder()):
            with pytest.raises(forge_algos.PackedBatchError):
                module(**arguments)
        # The right way in passes the guard, and so does a row that is not packed.
        loaded(**row, use_cache=False)
        loaded(row["input_ids"][:, :9])
    if attention == "eager":
        loaded(**arguments)


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("careless", FORBIDDEN)
def test_training_and_evaluating_refuse_it_too(tmp_path_factory: pytest.TempPathFactory, careless: str, adapter: str) -> None:
    """An objective that passes a cache or a mask with a packed row is stopped by train and evaluate."""
    loaded = load(tiny.save("llama-tied", tmp_path_factory.mktemp("model")), "sdpa")
    if adapter == "lora":
        loaded = with_adapter(loaded)

    class Careless(forge_algos.SFT):
        """SFT, but its forward brings along what it must not."""

        def bind(self, model: Any, *, device: torch.device) -> Any:
            def terms_of(batch: Any, _totals: Any) -> forge_algos.LossTerms:
                row = {"input_ids": torch.tensor(batch.input_ids)[None], "position_ids": torch.tensor(batch.position_ids)[None]}
                return forge_algos.LossTerms(model(**row, **FORBIDDEN[careless](row)).logits.sum(), 1)

            terms_of.needs = 0  # ty: ignore
            return terms_of

    start = {name: parameter.detach().clone() for name, parameter in loaded.named_parameters()}
    optimizer = forge_algos.adamw(loaded, forge_algos.OptimizerSettings())
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    batch = forge_packing.collate(SAMPLES)
    run = partial(forge_algos.train, loaded, [[batch]], optimizer=optimizer, scheduler=constant, device=CPU.device.value)
    with pytest.raises(forge_algos.PackedBatchError):
        list(run(objective=Careless()))
    with pytest.raises(forge_algos.PackedBatchError):
        forge_algos.evaluate(loaded, [batch], objective=Careless(), device=CPU.device.value)
    assert all(torch.equal(parameter, start[name]) for name, parameter in loaded.named_parameters())
    (output,) = run(objective=forge_algos.SFT())
    assert output.loss_count > 0
