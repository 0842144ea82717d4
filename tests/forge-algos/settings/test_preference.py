"""Settings of preference objectives: refused exactly where the loss itself would raise."""

import itertools
from typing import get_args

import attrs
import pytest
import torch

from forge_algos import DPOSettings, KTOSettings, LossError, ORPOSettings, RewardSettings, SimPOSettings, losses
from forge_algos.settings._dpo_types import DPO_TYPES, DPOLoss

LOGPS = torch.tensor([-3.0, -5.0])
LENGTHS = torch.tensor([2, 3])


def test_the_names_are_the_losses():
    """The choices are the rows of the table."""
    assert get_args(DPOLoss) == tuple(DPO_TYPES)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"f_divergence": "forward_kl"},
        {"label_smoothing": 0.1, "f_divergence": "js_divergence"},
        {"f_divergence": "alpha_divergence", "f_divergence_alpha": 0.2},
        {"f_divergence_alpha": 0.2},
        {"discopop_tau": 0.2},
        {"loss_weights": (1.0,)},
        {"loss_weights": (1.0, 0.5)},
    ],
    ids=str,
)
def test_settings_refuse_what_the_loss_refuses(options):
    """DPOSettings raises if and only if `losses.dpo` does with the same options.
    For every type and every two of them.
    """
    for types in [*((kind,) for kind in DPO_TYPES), *itertools.combinations(DPO_TYPES, 2)]:
        refused = []
        for call in (
            lambda types=types: losses.dpo(
                *[LOGPS] * 4, loss_type=types, chosen_lengths=LENGTHS, rejected_lengths=LENGTHS, **options
            ),
            lambda types=types: DPOSettings(loss_type=types, normalize="trl", **options),
        ):
            try:
                call()
                refused.append(False)
            except (LossError, ValueError):
                refused.append(True)
        assert refused[0] == refused[1], types


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPOSettings(loss_type="sigmod"), "'sigmod'"),
        (lambda: DPOSettings(loss_type=[]), "loss_type must hold at least one"),
        (lambda: DPOSettings(beta=0), "beta must be at least 1e-09"),
        (lambda: DPOSettings(label_smoothing=0.5), "label_smoothing must be at least 0 and below 0.5"),
        (lambda: DPOSettings(f_divergence_alpha=0.1), "has no effect with f_divergence=reverse_kl.*set f_div"),
        (lambda: DPOSettings(discopop_tau=0.1), "has no effect with loss_type=sigmoid; those that read it: discopop"),
        (lambda: DPOSettings(ld_alpha=1.5), "ld_alpha must be at least 0 and at most 1, got 1.5"),
        (lambda: DPOSettings(ld_alpha=0.5, loss_type="sft"), "ld_alpha=0.5 has no effect with loss_type=sft"),
        (lambda: SimPOSettings(cpo_alpha=-1), "cpo_alpha must be at least 0"),
        (lambda: DPOSettings(loss_type="aot"), "aot sorts the pairs of a micro-batch.*set normalize='trl'"),
        (lambda: DPOSettings(loss_type=["sigmoid", "aot_unpaired"]), "aot_unpaired sorts"),
        (lambda: DPOSettings(reference="adapter_off", reference_path="a/b"), "reference_path='a/b' has no effect"),
        (lambda: KTOSettings(reference="adapter_off", reference_path="a/b"), "reference_path='a/b' has no effect"),
        (lambda: KTOSettings(desirable_weight=0), "desirable_weight must be above 0"),
        (lambda: ORPOSettings(learn_prompt=1), "learn_prompt"),
        (lambda: ORPOSettings(normalize="mean"), "normalize"),
        (lambda: DPOSettings(loss_type="aot", normalize="trl", wpo=True), "loss_type=aot sorts them"),
        (lambda: DPOSettings(wpo=1), "wpo"),
        (lambda: DPOSettings(reference_mixup=0.5), "reference_mixup=0.5 has no effect with reference='stored'"),
        (lambda: KTOSettings(reference_sync_steps=5), "reference_sync_steps=5 has no effect with reference='stored'"),
        (lambda: DPOSettings(reference="moving", reference_mixup=0.0), "reference_mixup must be above 0"),
        (lambda: DPOSettings(reference="moving", reference_sync_steps=0), "reference_sync_steps must be at least 1"),
        (lambda: KTOSettings(reference="adapter_off", reference_path="a/b"), "whose reference is the model under the adapter"),
        (lambda: SimPOSettings(gamma=-1), "gamma must be at least 0"),
        (lambda: RewardSettings(centering=-1), "centering must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    """Impossible values are refused with the field's name and the value."""
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize("kind", [DPOSettings, KTOSettings, ORPOSettings, RewardSettings, SimPOSettings])
def test_every_field_is_described_and_the_defaults_are_good(kind):
    """Settings are frozen, keyword-only, made without arguments; each field has a docstring."""
    settings = kind()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        settings.beta = 1.0
    with pytest.raises(TypeError):
        kind(0.1)
    assert settings.normalize == "global"


def test_lists_of_a_recipe_become_tuples():
    """Lists, as YAML and the command line give them, become tuples."""
    settings = DPOSettings(loss_type=["sigmoid", "sft"], loss_weights=[1, 0.5])
    assert (settings.loss_type, settings.loss_weights) == (("sigmoid", "sft"), (1, 0.5))
    assert DPOSettings(loss_type="ipo").loss_type == ("ipo",)
