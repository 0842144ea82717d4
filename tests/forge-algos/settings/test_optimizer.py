"""Settings of optimizers, adapters and objectives: refused values and defaults."""

import math
from typing import get_args

import attrs
import pytest
import torch
from torch import nn

from forge_algos import (
    AdapterSettings,
    DistillSettings,
    OptimizerSettings,
    PretrainSettings,
    SupervisedSettings,
    make_optimizer,
)
from forge_algos.settings._adapter_table import Adapter, default_learning_rate


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("learning_rate", bad) for bad in (0, -1.0, math.nan, math.inf, True, "1e-4")),
        *(("weight_decay", bad) for bad in (-0.1, math.nan, math.inf, False, None)),
        *((name, bad) for name in ("beta1", "beta2") for bad in (-0.1, 1.0, math.nan, "0.9")),
        *(("eps", bad) for bad in (0.0, -1e-8, math.nan)),
        *(("max_grad_norm", bad) for bad in (-1.0, math.nan, math.inf)),
        *(("warmup_steps", bad) for bad in (-1, 1.5, True, "3")),
        *(("warmup_ratio", bad) for bad in (-0.1, 1, True, "0.1")),
        *(("lr_scheduler", bad) for bad in ("cosin", None)),
        *(("on_nan", bad) for bad in ("ignore", None, True)),
        *(("optimizer", bad) for bad in ("adam", None)),
        *(("apollo_rank", bad) for bad in (0, -1, 1.5, True)),
        *(("apollo_update_interval", bad) for bad in (0, 1.5, None)),
        *(("apollo_scale", bad) for bad in (0, -1.0, math.nan, "2")),
        *(("momentum", bad) for bad in (-0.1, 1.0, math.nan)),
        *(("min_lr_ratio", bad) for bad in (-0.1, 1.0, math.nan)),
        *(("decay_steps", bad) for bad in (0, -1, 1.5, True)),
        *(("power", bad) for bad in (0, -1.0, math.inf)),
        *(("num_cycles", bad) for bad in (0, 0.5, True)),
    ],
)
def test_bad_optimizer_settings_are_refused(name, bad):
    """Out of range, not finite or of another type: refused with the field's name."""
    with pytest.raises((ValueError, TypeError), match=name):
        OptimizerSettings(**{name: bad})


LARGEST = {"learning_rate": 1e6, "weight_decay": 1e6, "eps": 1e6}
OPTIMIZERS = {
    "adamw": {},
    "adafactor": {"eps": None},
    "muon": {},
    "schedule_free": {"lr_scheduler": "constant"},
    "apollo": {"apollo_scale": 1e6},
    "apollo_mini": {"apollo_scale": 1e6},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("beta1", [1 - 2**-53, 0.9])
def test_the_largest_factors_make_a_step(name, beta1):
    """A larger one is refused by name, and with none of those accepted a step is a bare overflow of float32."""
    given = {name: value for name, value in {**LARGEST, **OPTIMIZERS[name]}.items() if value is not None}
    betas = {} if name == "adafactor" else {"beta1": beta1}
    settings = OptimizerSettings(optimizer=name, **given, **betas)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 8)])})
    optimizer = make_optimizer(model, settings)
    optimizer.train() if name == "schedule_free" else None
    for _ in range(2):
        model["layers"][0](torch.ones(1, 4)).sum().backward()
        optimizer.step()
    for setting in given.keys() - {"lr_scheduler"}:
        with pytest.raises(ValueError, match=rf"{setting} must be .* at most 1e\+06, got 1e\+300"):
            OptimizerSettings(optimizer=name, **{**given, setting: 1e300})


def test_an_eps_that_float32_has():
    """A row without a gradient is divided by eps alone, which float32 took for 0."""
    with pytest.raises(ValueError, match="eps must be at least 1e-30"):
        OptimizerSettings(eps=1e-50)
    model = nn.Linear(2, 2)
    model.weight.grad = torch.zeros(2, 2)
    make_optimizer(model, OptimizerSettings(eps=1e-30)).step()
    assert model.weight.isfinite().all()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("adapter", bad) for bad in ("qlra", "", None)),
        *(("lora_r", bad) for bad in (0, -4, 2.0, True)),
        *(("lora_alpha", bad) for bad in (0, -1.0, math.nan, math.inf)),
        *(("lora_dropout", bad) for bad in (-0.1, 1.0, math.nan)),
        *((name, bad) for name in ("oft_block_size",) for bad in (1, 4.0, True)),
        *((name, bad) for name in ("vera_rank", "fourier_n_frequency", "c3a_block_size") for bad in (0, 4.0, True)),
        *(("fourier_scaling", bad) for bad in (0, -1.0, math.nan)),
        *((name, bad) for name in ("target_modules", "feedforward_modules") for bad in ("q_proj", (), ("",), (1,), 3)),
        *(("quant_type", bad) for bad in ("int4", None)),
        *(("double_quant", bad) for bad in (1, None, "yes")),
    ],
)
def test_bad_adapter_settings_are_refused(name, bad):
    """Adapter settings are refused in the same way; a bare string is not a list of letters."""
    with pytest.raises((ValueError, TypeError), match=name) as caught:
        AdapterSettings(**{"adapter": "lora", name: bad})
    assert "no effect" not in str(caught.value)


def test_8_bits_have_no_double_quantisation():
    """Its scales are one a row: double_quant has no effect, and is refused."""
    with pytest.raises(ValueError, match="double_quant=False has no effect with quant_type='int8'.*quant_type=nf4 or fp4"):
        AdapterSettings(adapter="qlora", quant_type="int8", double_quant=False)


LORAS = ("lora", "qlora", "dora", "rslora")
TUNERS = ("oft", "qoft", "hra", "loha", "lokr", "miss", "vera", "randlora", "fourierft", "c3a")
# For each setting of an adapter a value that is not its default, and the adapters that read it.
READ_BY = {
    "target_modules": (("q_proj",), (*LORAS, "ia3", *TUNERS, "osft")),
    "modules_to_save": (("embed_tokens",), (*LORAS, "ia3", *TUNERS)),
    "unfrozen_parameters": (("lm_head",), ("none",)),
    "lora_r": (8, (*LORAS, "hra", "loha", "lokr", "miss", "randlora")),
    "lora_alpha": (1, (*LORAS, "loha", "lokr", "randlora")),
    "lora_dropout": (0.1, (*LORAS, "miss", "vera", "randlora")),
    "oft_block_size": (8, ("oft", "qoft")),
    "vera_rank": (8, ("vera",)),
    "fourier_n_frequency": (8, ("fourierft",)),
    "fourier_scaling": (300, ("fourierft",)),
    "c3a_block_size": (8, ("c3a",)),
    "quant_type": ("int8", ("qlora", "qoft")),
    "double_quant": (False, ("qlora", "qoft")),
    "feedforward_modules": (("down_proj",), ("ia3",)),
    "num_virtual_tokens": (5, ("prefix", "prompt", "adapter_prompt")),
    "prefix_projection": (True, ("prefix",)),
    "prompt_init_text": ("Classify:", ("prompt",)),
    "adapter_layers": (2, ("adapter_prompt",)),
    "unfreeze_rank_ratio": (0.5, ("osft",)),
    "osft_rule": ("paper", ("osft",)),
    "osft_form": ("factors", ("osft",)),
    "osft_directions": ("inputs", ("osft",)),
    "osft_rank": ("adaptive", ("osft",)),
    "osft_calibration_path": ("rows.jsonl", ("osft",)),
    "adapter_path": ("somewhere", (*LORAS, "ia3", "prefix", "prompt", "adapter_prompt", *TUNERS)),
    "init_lora_weights": ("pissa", ("lora", "qlora", "dora", "rslora")),
    "lora_fa": (True, ("lora", "qlora", "rslora")),
    "rank_pattern": (("q_proj=8",), ("lora", "qlora", "dora", "rslora", "osft")),
    "alpha_pattern": (("q_proj=8",), ("lora", "qlora", "dora", "rslora")),
    "osft_train_rest": (("norms",), ("osft",)),
    "osft_svd": ("randomized", ("osft",)),
    "osft_cache": ("somewhere", ("osft",)),
}
# What a setting needs beside its adapter.
BESIDE = {"osft_calibration_path": {"osft_rank": "adaptive"}}


def test_every_setting_of_an_adapter_is_here():
    """The table of this test has every adapter setting, so that a new one is tested too."""
    assert set(READ_BY) == {field.name for field in attrs.fields(AdapterSettings)} - {"adapter"}


@pytest.mark.parametrize("adapter", get_args(Adapter))
@pytest.mark.parametrize("name", READ_BY)
def test_a_setting_without_effect_is_refused(name, adapter):
    """A setting of one adapter beside another is refused with the adapters that read it.
    Where it is read it stays as given.
    """
    value, readers = READ_BY[name]
    if adapter in readers:
        assert getattr(AdapterSettings(adapter=adapter, **{name: value}, **BESIDE.get(name, {})), name) == value
        return
    with pytest.raises(ValueError, match=f"{name}=.*no effect with adapter='{adapter}'.*set adapter=.*{readers[-1]}$"):
        AdapterSettings(adapter=adapter, **{name: value})


@pytest.mark.parametrize(
    ("given", "directions"),
    [
        ({}, "weights"),
        ({"osft_calibration_path": "rows.jsonl"}, "inputs"),
        ({"osft_calibration_path": "rows.jsonl", "osft_rank": "adaptive"}, "weights"),
        ({"osft_calibration_path": "rows.jsonl", "osft_rule": "paper"}, "inputs"),
    ],
)
def test_rows_of_what_is_to_be_kept_choose_what_osft_protects(given, directions):
    """Inputs where there are rows to measure them on, unless these are for the shares."""
    chosen = AdapterSettings(adapter="osft", **given)
    assert chosen.protects == directions
    assert AdapterSettings(**attrs.asdict(chosen)) == chosen


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"osft_directions": "weights"},
            "no effect with osft_directions='weights' and osft_rank='uniform': leave it or",
        ),
        ({"osft_form": "factors"}, "osft_form='factors' is of singular vectors, and what osft_calibration_path protects takes"),
        ({"osft_directions": "inputs", "osft_cache": "there"}, "singular vectors, and osft_directions='inputs' takes none"),
    ],
)
def test_what_does_not_go_with_rows_to_keep_is_refused_by_what_was_given(given, says):
    """The message names no setting that was left open."""
    with pytest.raises(ValueError, match=says):
        AdapterSettings(adapter="osft", osft_calibration_path="rows.jsonl", **given)


def test_ints_are_numbers_and_lists_tuples():
    """An int is taken where a float is meant, and a list where a tuple is."""
    assert OptimizerSettings(learning_rate=1, weight_decay=0).learning_rate == 1
    assert AdapterSettings(adapter="lora", target_modules=["q_proj"]).target_modules == ("q_proj",)


def test_the_default_rate_is_the_adapters():
    """2e-5 for all weights, 2e-4 for LoRA, others by adapter; a given rate stays."""
    for adapter in get_args(Adapter):
        assert 0 < default_learning_rate(adapter) < 1
    assert {default_learning_rate(adapter) for adapter in LORAS} == {2e-4}
    assert OptimizerSettings().resolve().learning_rate == 2e-5
    assert OptimizerSettings().resolve("lora").learning_rate == 2e-4
    assert OptimizerSettings(learning_rate=3.0).resolve("lora").learning_rate == 3.0


def test_settings_are_frozen():
    """Settings cannot be changed."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        OptimizerSettings().eps = 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"optimizer": "adafactor", name: 0.5}, f"{name}=0.5 has no effect with optimizer='adafactor'.*adamw, muon")
            for name in ("beta1", "beta2", "eps")
        ),
        *(
            ({"optimizer": name, "momentum": 0.5}, f"momentum=0.5 has no effect with optimizer='{name}'.*optimizer=muon")
            for name in ("adamw", "adafactor", "adamw_8bit")
        ),
        *(
            ({"optimizer": name, field: 5}, f"{field}=5 has no effect with optimizer='{name}'.*optimizer=apollo or apollo_mini")
            for name in ("adamw", "muon")
            for field in ("apollo_rank", "apollo_update_interval", "apollo_scale")
        ),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio=0.1 has no effect with lr_scheduler='cosine'.*cosine_with_min_lr, polynomial or"),
        ({"decay_steps": 3, "lr_scheduler": "linear"}, "decay_steps=3 has no effect with lr_scheduler='linear'"),
        ({"power": 2.0}, "power=2.0 has no effect with lr_scheduler='cosine'.*lr_scheduler=polynomial"),
        ({"num_cycles": 2}, "num_cycles=2 has no effect with lr_scheduler='cosine'.*cosine_with_restarts"),
        ({"optimizer": "schedule_free"}, "lr_scheduler='cosine' with optimizer='schedule_free'.*set lr_scheduler='constant'"),
        ({"optimizer": "schedule_free", "lr_scheduler": "constant", "beta1": 0.0}, "beta1=0 with optimizer='schedule_free'"),
        ({"lr_scheduler": "cosine_with_min_lr"}, "needs min_lr_ratio above 0"),
        ({"lr_scheduler": "warmup_stable_decay"}, "needs decay_steps"),
    ],
)
def test_optimizer_settings_without_effect_are_refused(given, message):
    """What the chosen optimizer or schedule does not read, or needs, is refused by name.
    With what to do.
    """
    with pytest.raises(ValueError, match=message):
        OptimizerSettings(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "muon", "momentum": 0.9, "beta1": 0.8},
        {"optimizer": "adamw_8bit", "eps": 1e-6},
        {"optimizer": "apollo", "apollo_rank": 8, "apollo_update_interval": 10, "apollo_scale": 2.0, "beta2": 0.9},
        {"optimizer": "apollo_mini", "apollo_scale": 128.0, "eps": 1e-6},
        {"optimizer": "schedule_free", "lr_scheduler": "constant", "beta1": 0.95, "warmup_steps": 3},
        {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.1},
        {"lr_scheduler": "cosine_with_restarts", "num_cycles": 2},
        {"lr_scheduler": "polynomial", "power": 2.0, "min_lr_ratio": 0.1},
        {"lr_scheduler": "inverse_sqrt"},
        {"lr_scheduler": "warmup_stable_decay", "decay_steps": 5, "min_lr_ratio": 0.1},
    ],
)
def test_optimizer_settings_with_effect_are_taken(given):
    """A setting is accepted where it is read."""
    found = OptimizerSettings(**given)
    assert {name: getattr(found, name) for name in given} == given


def test_adafactors_rate_is_its_own():
    """Adafactor's default rate is larger, being multiplied by a matrix's size.
    A given rate stays.
    """
    assert OptimizerSettings(optimizer="adafactor").resolve().learning_rate == pytest.approx(1e-3)
    assert OptimizerSettings(optimizer="adafactor").resolve("lora").learning_rate == pytest.approx(1e-2)
    assert OptimizerSettings(optimizer="adafactor", learning_rate=0.5).resolve().learning_rate == 0.5


@pytest.mark.parametrize(
    ("kind", "name", "bad"),
    [
        *((SupervisedSettings, "loss", bad) for bad in ("ce", None)),
        *((SupervisedSettings, "normalize", bad) for bad in ("mean", None)),
        *(
            (kind, "label_smoothing", bad)
            for kind in (SupervisedSettings, PretrainSettings)
            for bad in (-0.1, 1.0, math.nan, "0")
        ),
        *((kind, "z_loss", bad) for kind in (SupervisedSettings, PretrainSettings) for bad in (-1e-4, math.inf, True)),
        *((SupervisedSettings, "neftune_alpha", bad) for bad in (-1, math.nan, "5")),
        *((PretrainSettings, "block_size", bad) for bad in (1, 0, 2.0, True)),
        *((PretrainSettings, "cross_documents", bad) for bad in (1, None, "yes")),
        *((DistillSettings, "teacher_path", bad) for bad in ("", 3)),
        *((DistillSettings, "beta", bad) for bad in (-0.1, 1.1, math.nan)),
        *((DistillSettings, "temperature", bad) for bad in (0, -1.0, math.inf)),
    ],
)
def test_bad_objective_settings_are_refused(kind, name, bad):
    """Out of range, not finite or of another type: refused with the field's name."""
    needed = {"teacher_path": "a/path"} if kind is DistillSettings else {}
    kind(**needed)
    with pytest.raises((ValueError, TypeError), match=name):
        kind(**{**needed, name: bad})


def test_betas_ends_are_divergences():
    """β of 0 and 1, the forward and the reverse KL, are allowed."""
    assert [DistillSettings(teacher_path="t", beta=beta).beta for beta in (0, 1)] == [0, 1]
