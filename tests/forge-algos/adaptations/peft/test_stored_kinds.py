"""Adapters of every kind that plain PEFT wrote go on as PEFT's own trainable model of them."""

import json
import re
from types import SimpleNamespace

import peft
import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from forge_algos import SFT, AdapterError, AdapterSettings, OptimizerSettings, adapt, make_optimizer, schedule, train
from forge_algos.settings._adapter_table import ADAPTERS

from ...oracle import distance, gradients, make, naive, pack, samples
from ..base.test_targets import tiny

IDS = torch.arange(3, 12)[None]
FILE = "adapter_model.safetensors"
TOKENS = {"prefix": "PrefixTuningConfig", "prompt": "PromptTuningConfig", "adapter_prompt": "AdaptionPromptConfig"}
# Of each kind what PEFT's configuration has beyond what a run of ours can be given, and once what it is by default.
WRITTEN = {
    "ia3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "oft": {"oft_block_size": 4, "use_cayley_neumann": False},
    "oft by blocks": {"r": 4, "oft_block_size": 0, "block_share": True},
    "oft of more terms": {"oft_block_size": 8, "num_cayley_neumann_terms": 3},
    "hra": {"r": 4, "apply_GS": True},
    "loha": {"r": 3, "alpha": 5, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "lokr": {"r": 2, "alpha": 5, "decompose_both": True, "decompose_factor": 4},
    "lokr of some layers": {"r": 2, "layers_to_transform": [1], "exclude_modules": ["k_proj"]},
    "miss": {"r": 4},
    "miss bat": {"r": 4, "init_weights": "bat"},
    "miss mini": {"r": 4, "mini_r": 2, "init_weights": "mini"},
    "vera": {"r": 8, "projection_prng_key": 5, "d_initial": 0.3},
    "vera unsaved": {"r": 8, "projection_prng_key": 5, "save_projection": False},
    "randlora": {"r": 4, "projection_prng_key": 6, "randlora_alpha": 9},
    "randlora unsaved": {"r": 4, "projection_prng_key": 6, "randlora_alpha": 9, "save_projection": False},
    "fourierft": {"n_frequency": 20, "scaling": 60, "random_loc_seed": 9, "n_frequency_pattern": {"q_proj": 11}},
    "c3a": {"block_size": 8, "block_size_pattern": {"q_proj": 4}, "init_weights": "kaiming_uniform"},
    "prefix": {"num_virtual_tokens": 3},
    "prompt": {"num_virtual_tokens": 3},
    "adapter_prompt": {"adapter_len": 3, "adapter_layers": 1},
}
every = pytest.mark.parametrize("kind", WRITTEN)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Specified to not (save|load):UserWarning"),
]


def config_of(kind, **more):
    adapter, given = kind.split()[0], {**WRITTEN[kind], **more}
    if adapter not in TOKENS:
        given = {"target_modules": "all-linear", **given}
    return getattr(peft, ADAPTERS[adapter].peft)(task_type="CAUSAL_LM", **given)


def moved(model):
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def written(folder, kind, **more):
    """Write PEFT's adapter with values that are not its first."""
    moved(get_peft_model(make(), config_of(kind, **more))).save_pretrained(folder)


def theirs(folder, kind):
    """Return PEFT's own trainable model of the directory; PEFT has none of prefixes and prompts, whose values are set."""
    torch.manual_seed(9)
    if kind.split()[0] not in ("prefix", "prompt"):
        return PeftModel.from_pretrained(make(), folder, is_trainable=True)
    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = False
    model = get_peft_model(make(), config)
    set_peft_model_state_dict(model, load_file(folder / FILE))
    return model


def going_on(folder, kind, model=None, **more):
    settings = AdapterSettings(**{"adapter": kind.split()[0], "adapter_path": str(folder), **more})
    return adapt(make() if model is None else model, settings)


def plain(model):
    """Return logits of one document, without the places of its virtual tokens."""
    return lambda input_ids, **more: SimpleNamespace(logits=model(input_ids, **more).logits[:, -input_ids.shape[1] :])


def logits(model):
    with torch.no_grad():
        return plain(model.eval())(input_ids=IDS).logits


@every
def test_it_is_pefts_own_model_of_the_directory(kind, tmp_path):
    """Logits, trained parameters and what PEFT writes of it, to the bit; a packed step's loss and gradients to 1e-6."""
    written(tmp_path / "first", kind)
    torch.manual_seed(5)
    ours, plainly = going_on(tmp_path / "first", kind).model, theirs(tmp_path / "first", kind)
    assert torch.equal(logits(ours), logits(plainly))
    trained = [{n for n, p in model.named_parameters() if p.requires_grad} for model in (ours, plainly)]
    assert trained[0] == trained[1]
    ours.save_pretrained(tmp_path / "second")
    one, other = (load_file(tmp_path / name / FILE) for name in ("first", "second"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)

    rows, found = samples([6, 9, 4, 1, 7]), {}
    optimizer = make_optimizer(ours, OptimizerSettings())
    optimizer.register_step_pre_hook(lambda *_: found.update(gradients(ours)))
    scheduler = schedule(optimizer, OptimizerSettings(), num_steps=1)
    (output,) = train(ours, [[pack(rows)]], objective=SFT(), optimizer=optimizer, scheduler=scheduler, max_grad_norm=0.0)
    total, count = naive(plain(plainly.train()), rows)
    (total / count).backward()
    assert output.loss == pytest.approx(total.item() / count, rel=1e-6)
    assert distance(found, gradients(plainly)) < 5e-6


def test_every_kind_is_here():
    """Every row of the table that PEFT serves can go on, and is tried here or, as LoRA's family, in test_stored."""
    rows = {name for name, kind in ADAPTERS.items() if "adapter_path" in kind.fields}
    assert rows == {name for name, kind in ADAPTERS.items() if kind.peft}
    assert {kind.split()[0] for kind in WRITTEN} == {
        name for name in rows if ADAPTERS[name].peft != "LoraConfig" and not ADAPTERS[name].quantized
    }


@pytest.mark.parametrize(
    ("kind", "given", "match"),
    [
        ("oft", {"oft_block_size": 8}, "oft_block_size=8: the adapter in adapter_path .* has oft_block_size=4"),
        ("oft by blocks", {"oft_block_size": 8}, "has r=4 blocks, of any size"),
        ("prompt", {"num_virtual_tokens": 4}, "num_virtual_tokens=4: .* has num_virtual_tokens=3"),
        ("ia3", {"feedforward_modules": ["v_proj"]}, "feedforward_modules"),
        ("miss", {"target_modules": ["q_proj"]}, "target_modules"),
        ("vera", {"adapter": "lora"}, "holds a vera adapter, and adapter=lora: set adapter=vera"),
    ],
)
def test_what_it_has_cannot_be_changed(kind, given, match, tmp_path):
    """A setting that says something else than the file is refused by name."""
    written(tmp_path, kind)
    with pytest.raises(AdapterError, match=match):
        going_on(tmp_path, kind, **given)


@pytest.mark.parametrize("kind", ["ia3", "oft", "prompt"])
@pytest.mark.parametrize(
    ("spoilt", "match"),
    [
        (lambda tensor: tensor * float("nan"), "has a number that is NaN or infinite"),
        (lambda tensor: tensor.to(torch.int8), "is of the type I8"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(kind, spoilt, match, tmp_path):
    """By the tensor's name, before anything is computed with it."""
    written(tmp_path, kind)
    tensors = load_file(tmp_path / FILE)
    name = min(tensors)
    save_file(tensors | {name: spoilt(tensors[name])}, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match=f"{re.escape(name)}.* {match}"):
        going_on(tmp_path, kind)


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("oft", {"coft": True}, "coft=True .* is not trained here .rotations"),
        ("hra", {"bias": "all"}, "bias='all' .* is not trained here .biases"),
        ("miss", {"later": 1}, "has later=1, which PEFT .* does not know"),
        ("oft", {"oft_block_size": 1}, r"is not what PEFT writes .oft_block_size=1"),
        ("ia3", {"peft_type": "BOFT"}, "of the kind BOFT, and a run goes on from .*LORA"),
    ],
)
def test_what_is_not_trained_here_is_refused(kind, change, match, tmp_path):
    """An option, a field of another version of PEFT, and a kind of adapter."""
    written(tmp_path, kind)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(AdapterError, match=match):
        going_on(tmp_path, kind)


def test_the_adapter_of_another_model_is_refused(tmp_path):
    """Virtual tokens of another width, and layers that are not there."""
    for kind in ("prefix", "lokr"):
        written(tmp_path / kind, kind)
        with pytest.raises(AdapterError, match="is not an adapter of this"):
            going_on(tmp_path / kind, kind, tiny("Llama"))


def test_dropouts_without_a_setting_are_left_out(tmp_path):
    """And the log says so."""
    written(tmp_path, "loha", rank_dropout=0.5)
    found = going_on(tmp_path, "loha")
    assert found.model.peft_config["default"].rank_dropout == 0
    assert any("without its rank_dropout=0.5" in line for line in found.describe())


def test_a_projected_prefix_goes_on_without_its_network(tmp_path):
    """PEFT stores what the network computed."""
    settings = AdapterSettings(adapter="prefix", num_virtual_tokens=3, prefix_projection=True)
    first = moved(adapt(make(), settings).model)
    first.save_pretrained(tmp_path)
    found = going_on(tmp_path, "prefix").model
    assert torch.equal(logits(found), logits(first))
    with pytest.raises(ValueError, match="prefix_projection=True has no effect with adapter_path"):
        going_on(tmp_path, "prefix", prefix_projection=True)
