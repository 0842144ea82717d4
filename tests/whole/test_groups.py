"""Groups of completions: with their prompt in the row once or repeated, each is scored as it is alone.

forge_packing collates, forge_algos makes the forward's arguments, forge_accel attends. The oracle is a plain eager model on one
unpadded completion at a time; log-probabilities and every parameter's gradient within 1e-5 relative.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forge_algos
import forge_packing

from ..lanes import quick_keeps
from . import reference, tiny
from .wiring import CPU, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .reference import Sample

CLOSE = 1e-5
MODELS = ("llama-tied", "qwen3", "mistral-window", "gemma3-window")


def completions(prompt: int, lengths: list[int], seed: int, *, turns: int = 0) -> list[Sample]:
    """Samples that begin with the same `prompt` tokens; with `turns`, so many masked tokens stand amid each completion."""
    start = tiny.sample(prompt, seed, None).input_ids
    group = []
    for index, length in enumerate(lengths):
        own = tiny.sample(length, 100 * seed + index).input_ids
        labels = list(own)
        labels[length // 3 : length // 3 + turns] = [reference.NO_LOSS] * len(labels[length // 3 : length // 3 + turns])
        group.append(reference.Sample(start + own, [reference.NO_LOSS] * prompt + labels))
    return group


GROUPS = [
    completions(9, [6], 1),
    completions(1, [3, 7], 2),
    completions(13, [5, 1, 11, 2, 8], 3, turns=2),
    completions(6, [12, 9], 4, turns=3),
    completions(2, [1, 1], 5),
]
SAMPLES = [sample for group in GROUPS for sample in group]
WEIGHTS = [0.3 + 0.2 * index * (-1) ** index for index in range(len(SAMPLES))]
"""A weight a completion, so that what belongs to one cannot stand in for what belongs to another."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The tiny model of that name, saved once."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda name: tiny.save(name, folder / name))


@pytest.fixture(scope="module")
def alone(directory) -> Callable[[str], tuple[torch.Tensor, reference.Gradients]]:
    """Name of a model -> the learned tokens' log-probabilities float[M] and the gradients, one completion at a time."""

    @cache
    def wanted(name: str) -> tuple[torch.Tensor, reference.Gradients]:
        model = tiny.plain(directory(name))
        found = []
        for sample, weight in zip(SAMPLES, WEIGHTS, strict=True):
            labels = torch.tensor(sample.labels[1:])
            (at,) = torch.nonzero(labels != reference.NO_LOSS, as_tuple=True)
            logps = reference.sample_logits(model, sample).log_softmax(-1)[at, labels[at]]
            (weight * logps.sum()).backward()
            found.append(logps.detach())
        return torch.cat(found), {at: parameter.grad for at, parameter in model.named_parameters()}

    return wanted


def scored(model: Any, groups: list[list[Sample]], *, share: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities of the learned tokens float[M], and the same cut by completion."""
    batch = forge_packing.collate_groups(groups, share_prompt=share)
    forge_algos.check_groups(batch, tiny.VOCABULARY)
    assert (batch.kv_rows is not None) == share
    device = CPU.device.value
    rows, targets, lengths = forge_algos.group_tensors(batch, device)
    with forge_algos.guard_packed(model):
        logits = model(**forge_algos.group_inputs(batch, device)).logits[0]
    logps = logits[rows].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return logps, list(logps.split(lengths.tolist()))


@pytest.mark.parametrize(
    ("name", "share", "checkpointing"),
    quick_keeps(
        [*product(["llama-tied"], [False, True], [False]), *product(["gemma3-window"], [True], [False, True])],
        list(product(MODELS, [False, True], [False, True])),
    ),
)
def test_a_group_is_scored_as_its_completions_alone(directory, alone, name: str, share: bool, checkpointing: bool) -> None:
    """Groups of one, two and five, ragged, of several turns, after a prompt of one token, windows shorter than the prompts."""
    model = load(directory(name), "documents").train()
    assert forge_algos.shares_prompts(model, device=CPU.device.value)[0]
    if checkpointing:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)(
            {"use_reentrant": False}
        )
    calls: list[int] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    wanted, gradients = alone(name)
    logps, parts = scored(model, GROUPS, share=share)
    sum(weight * part.sum() for weight, part in zip(WEIGHTS, parts, strict=True)).backward()
    assert len(calls) == (2 if checkpointing else 1)
    assert (logps - wanted).norm() <= CLOSE * wanted.norm()
    whole = reference.norm(gradients)
    for at, parameter in model.named_parameters():
        size = gradients[at].norm().item()
        assert (parameter.grad - gradients[at]).norm().item() <= (CLOSE * size if size > 1e-6 * whole else 1e-7 * whole), at


@pytest.mark.parametrize("name", MODELS)
def test_completions_of_a_prompt_do_not_see_each_other(directory, name: str) -> None:
    """Other tokens, or more, in one completion leave the log-probabilities of all others unchanged."""
    model = load(directory(name), "documents")
    assert forge_algos.shares_prompts(model, device=CPU.device.value)[0]
    with torch.no_grad():
        _, before = scored(model, GROUPS[2:4], share=True)
        for changed in range(5):
            group = list(GROUPS[2])
            group[changed] = completions(13, [5, 1, 11, 2, 8], 3)[changed]._replace(
                input_ids=group[changed].input_ids[:13] + tiny.sample(4, 77).input_ids,
                labels=[reference.NO_LOSS] * 13 + tiny.sample(4, 77).input_ids,
            )
            _, after = scored(model, [group, GROUPS[3]], share=True)
            for index, (was, now) in enumerate(zip(before, after, strict=True)):
                if index != changed:
                    torch.testing.assert_close(now, was, rtol=0, atol=2e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_without_shared_prompts_is_refused(directory, attention: str) -> None:
    """transformers' own attention ignores kv_rows: `shares_prompts` is False, and a row that shares prompts is refused."""
    model = load(directory("llama-tied"), attention)
    can, why = forge_algos.shares_prompts(model, device=CPU.device.value)
    assert not can
    assert f"attention {attention!r} does not know kv_rows" in why
    with pytest.raises(forge_algos.PackedBatchError, match="share_prompt=False"):
        scored(model, GROUPS, share=True)


SHARING = {
    *tiny.CONFIGS,
    "gemma2: capped scores",
    "gpt-oss: sinks, and a mask made without positions",
    "opt: positions from the mask",
}
REFUSED = {"llama4: chunked attention", "bloom: distances over the whole row"}
"""Models that forge_dist does not load with document attention, as its own tests assert."""


@pytest.mark.parametrize("name", [*tiny.CONFIGS, *sorted(tiny.OTHER_CONFIGS.keys() - REFUSED)])
def test_a_model_that_says_yes_is_right(tmp_path: Path, name: str) -> None:
    """Whatever the architecture: a model that reports shared prompts computes them correctly."""
    directory = tiny.save(name, tmp_path)
    model = load(directory, "documents")
    can, why = forge_algos.shares_prompts(model, device=CPU.device.value)
    assert can == (name in SHARING), why
    if not can:
        return
    with torch.no_grad():
        _, parts = scored(model, GROUPS, share=True)
        plain = tiny.plain(directory)
        for sample, part in zip(SAMPLES, parts, strict=True):
            assert -part.sum().item() == pytest.approx(reference.sample_loss(plain, sample)[0].item(), rel=CLOSE)


def test_a_shared_prompt_is_computed_once(directory) -> None:
    """What goes through the model is each prompt once and each completion once, no more."""
    tokens = len(forge_packing.collate_groups(GROUPS, share_prompt=True).input_ids)
    repeated = len(forge_packing.collate_groups(GROUPS).input_ids)
    assert tokens == 9 + 1 + 13 + 6 + 2 + sum(len(sample.input_ids) for sample in SAMPLES) - (9 + 2 + 65 + 12 + 4)
    assert repeated == sum(len(sample.input_ids) for sample in SAMPLES)
