"""A run that keeps its changes beside its weights: trained and saved as they are, exported as the
plain model that they make.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from forge_dist import ExportError, check_export, export_model, load_model

from ...ranks import run_on_ranks
from ..divided import SAMPLES, by_family, strategy_of
from ..training import Kept, alone, train

TARGETS = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
BESIDE = [f"{name}.beside" for name in TARGETS]


class Beside(nn.Module):
    """ΔW = left · core · right of a linear layer [N, M], as an orthogonal subspace has it; only the
    core, [3, 3], is trained.
    """

    def __init__(self, shape, core):
        super().__init__()
        self.core = nn.Parameter(core)
        self.register_buffer("left", torch.linspace(-1, 1, shape[0] * 3).reshape(-1, 3).clone(), persistent=False)
        self.register_buffer("right", torch.linspace(1, -2, 3 * shape[1]).reshape(3, -1).clone(), persistent=False)

    def forward(self, x):
        return x @ self.right.T @ self.core.T @ self.left.T

    def whole(self):
        return self.left @ self.core @ self.right


def beside(model):
    """Freeze `model` and put a change beside each target; returns what makes it plain."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    changes = {}
    for name in TARGETS:
        linear = model.get_submodule(name)
        linear.beside = Beside((linear.out_features, linear.in_features), torch.randn(3, 3, generator=generator) * 0.05)
        linear.register_forward_hook(lambda module, args, output: output + module.beside(args[0]))
        changes[f"{name}.weight"] = linear.beside
    return lambda name, tensor: tensor + changes[name].whole() if name in changes else tensor


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-3)


def start(strategy, path, kept=None):
    model = strategy.load(path, dtype=torch.float32)
    strategy.settle(model)
    plain = beside(model)
    model, optimizer = strategy.wrap(model, adamw)
    if kept is not None:
        strategy.load_state(model, optimizer, kept)
    return model.train(), optimizer, plain


def scenario(ranks, names, path, directory, kept=None):
    """name → what a run saw: two steps, its state and gradients, its exports' checks, what was refused, a third step; and
    `kept` given back.
    """
    found = {}
    for name in names:
        strategy = strategy_of(ranks, name)
        model, optimizer, plain = start(strategy, path)
        seen = found[name] = {"done": train(strategy, model, optimizer, steps=(0, 1)), "checks": [], "reported": []}
        seen["state"] = Kept.of(strategy.state(model, optimizer))
        for dtype in (torch.bfloat16, None):
            where = Path(directory, f"{name}-{strategy.world_size}-{dtype}")
            export_model(model, where, dtype=dtype, strategy=strategy, without=BESIDE, plain=plain)
            seen["checks"].append(check_export(model, where, SAMPLES, strategy=strategy, without=BESIDE, plain=plain))
        for wrong in (None, lambda key, tensor, plain=plain: plain(key, tensor) * (1 + ("1.mlp.up" in key)), fails):
            with pytest.raises(ExportError) as reported:
                check_export(model, where, SAMPLES, strategy=strategy, without=BESIDE, plain=wrong)
            seen["reported"].append(str(reported.value))
        seen["again"] = train(strategy, model, optimizer, steps=(2,))
        if kept is not None:
            strategy = strategy_of(ranks, name)
            model, optimizer, _ = start(strategy, path, kept)
            seen["kept"] = Kept.of(strategy.state(model, optimizer))
            seen["next"] = train(strategy, model, optimizer, steps=(2,))
    return found


def fails(name, _tensor):
    raise ValueError(f"nothing is known of {name}")


@pytest.fixture(scope="module")
def one(tmp_path_factory, make_model):
    """In one process: (path of the base, folder of the exports, what was seen)."""
    where = tmp_path_factory.mktemp("plain")
    make_model("llama-tied").save_pretrained(where / "base")
    with alone() as ranks:
        return str(where / "base"), where, scenario(ranks, ["single"], str(where / "base"), where)["single"]


def proved(seen, name):
    """That a run's exports were found right, and wrong ones named by the first tensor that differs."""
    rounded, exact = seen["checks"]
    assert (exact.tolerance, rounded.tolerance) == (1e-5, 1e-1)
    assert exact.difference <= 1e-6, name
    assert "q_proj.weight is not the one in memory" in seen["reported"][0], name
    assert "layers.1.mlp.up_proj.weight is not the one in memory" in seen["reported"][1], name
    assert "nothing is known of model.embed_tokens.weight" in seen["reported"][2], name


def test_alone(one):
    """The files hold W + ΔW under the names of the base, plain transformers computes what the run does, and the run goes on as
    it was.
    """
    path, where, seen = one
    proved(seen, "single")
    exported, report = AutoModelForCausalLM.from_pretrained(where / "single-1-None", output_loading_info=True)
    assert not any(report.values())
    model = load_model(path, dtype=torch.float32, device="cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = beside(model)
    for name, tensor in seen["state"].items():
        if name.startswith("model/"):
            model.get_parameter(name.removeprefix("model/")).data.copy_(tensor)
    ids = torch.tensor([SAMPLES[1][0]])
    torch.testing.assert_close(exported(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-5)
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, plain(name, before[name])), name
        assert torch.equal(tensor, before[name]) == (name.removesuffix(".weight") not in TARGETS), name
    assert sorted(key for key in seen["state"] if key.startswith("model/")) == sorted(f"model/{name}.core" for name in BESIDE)


@pytest.mark.slow
@by_family
def test_on_two_ranks(one, names, tmp_path):
    """The same losses, norms and state where the model is copied or divided, the same files, and a state of one process goes
    on.
    """
    path, where, single = one
    for rank in run_on_ranks(scenario, 2, names, path, str(tmp_path), single["state"]):
        for name, seen in rank.items():
            proved(seen, name)
            for (loss, norm, clipped), (expected, expected_norm, _) in zip(seen["done"], single["done"], strict=True):
                assert loss == pytest.approx(expected, rel=1e-5), name
                assert norm == pytest.approx(expected_norm, rel=1e-4), name
                assert clipped == pytest.approx(0.5, rel=1e-4) or name.startswith("zero"), name
            assert all(torch.equal(seen["kept"][key], single["state"][key]) for key in single["state"]), name
            assert seen["next"][0][0] == pytest.approx(single["again"][0][0], rel=1e-5), name
            assert seen["state"].keys() == single["state"].keys(), name
            for key, tensor in single["state"].items():
                torch.testing.assert_close(seen["state"][key], tensor, rtol=1e-3, atol=1e-5)
            found = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-2-None").state_dict()
            for key, tensor in AutoModelForCausalLM.from_pretrained(where / "single-1-None").state_dict().items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-4)
    with alone() as ranks:  # and back
        strategy = strategy_of(ranks, "single")
        model, optimizer, _ = start(strategy, path, seen["state"])
        assert all(torch.equal(seen["state"][key], tensor) for key, tensor in Kept.of(strategy.state(model, optimizer)).items())
        assert train(strategy, model, optimizer, steps=(2,))[0][0] == pytest.approx(seen["again"][0][0], rel=1e-5)


def test_an_addition_without_a_state(base, tmp_path):
    """What keeps only constants, which no state holds, is named like the others, and so is one in two places; a module that is
    not there is still refused.
    """
    model = load_model(base, dtype=torch.float32, device="cpu")
    model.model.layers[0].mlp.up_proj.bases = nn.Module()
    model.model.layers[0].mlp.up_proj.bases.register_buffer("left", torch.ones(3), persistent=False)
    model.model.layers[0].mlp.gate_proj.bases = model.model.layers[0].mlp.up_proj.bases
    without = ["model.layers.0.mlp.up_proj.bases", "model.layers.0.mlp.gate_proj.bases"]
    check_export(model, export_model(model, tmp_path / "out", without=without), SAMPLES, without=without)
    with pytest.raises(ExportError, match=r"without names 'model\.layers\.1\.mlp\.up_proj\.bases'"):
        export_model(model, tmp_path / "no", without=["model.layers.1.mlp.up_proj.bases"])


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (lambda _, tensor: tensor.double(), r"plain gives torch.float64 \[61, 16\] for model.embed_tokens.weight"),
        (lambda _, tensor: tensor[:1], r"plain gives torch.float32 \[1, 16\]"),
        (fails, "nothing is known of model.embed_tokens.weight"),
    ],
)
def test_what_is_no_plain_tensor(base, tmp_path, plain, message):
    """Another type or shape than the model's, or an error, is an error of the export, and nothing is left."""
    model = load_model(base, dtype=torch.float32, device="cpu")
    with pytest.raises(ExportError, match=message):
        export_model(model, tmp_path / "out", plain=plain)
    assert not (tmp_path / "out").exists()


def test_tied_weights_stay_tied(base, tmp_path):
    """What changes a tied weight is asked once, under its first name, and the export ties it too."""
    model, asked = load_model(base, dtype=torch.float32, device="cpu"), []

    def plain(name, tensor):
        asked.append(name)
        return tensor * 2 if name == "model.embed_tokens.weight" else tensor

    directory = export_model(model, tmp_path / "out", plain=plain)
    assert "lm_head.weight" not in asked
    assert len(asked) == len(set(asked)) == len(list(model.parameters()))
    back = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(back.lm_head.weight, model.lm_head.weight * 2)
    assert back.lm_head.weight is back.get_input_embeddings().weight
