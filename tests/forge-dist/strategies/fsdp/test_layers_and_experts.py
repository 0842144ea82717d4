"""Layers and experts divided over ranks (tp_size, ep_size): trained, saved, resumed and exported as in one process."""

import shutil
from pathlib import Path

import pytest
import torch

import forge_dist
from forge_dist import Checkpoints, StrategyError, StrategySettings
from forge_dist.loading._divisible import check_divisible

from ....ranks import run_on_ranks
from ...conftest import SIZES
from ...training import Absent, alone, go_on, oracle, report, start, train

MIXTURES = ("qwen3_moe", "mixtral")


def mixture(kind):
    """A tiny mixture of experts with random weights."""
    import transformers

    sizes = {**SIZES, "num_experts_per_tok": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "qwen3_moe":
            config = transformers.Qwen3MoeConfig(**sizes, head_dim=4, moe_intermediate_size=8, num_experts=4)
        else:
            config = transformers.MixtralConfig(**sizes, num_local_experts=4)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(scope="module")
def paths(tmp_path_factory, make_model):
    """name → directory of a tiny model"""
    folder = tmp_path_factory.mktemp("divided")
    for name in ("llama-tied", "qwen3"):
        make_model(name).save_pretrained(folder / name)
    for name in MIXTURES:
        mixture(name).save_pretrained(folder / name)
    return {path.name: str(path) for path in folder.iterdir()}


def scenario(ranks, path, options, directory):
    """What a strategy is asked to do, in one set of ranks: train, save, resume, export and prove the export."""
    found = report(ranks, path, options)
    strategy, model, optimizer = start(ranks, path, options)
    found["data"] = strategy.data_parallel_size, strategy.data_parallel_rank
    train(strategy, model, optimizer, (0,))
    go_on(found, ranks, path, options, directory, started=(strategy, model, optimizer))
    return found


def resumed(ranks, path, options, directory):
    """The step after a state that other ranks saved."""
    strategy, model, optimizer = start(ranks, path, options)
    with Checkpoints(Path(directory, "full_state"), ranks, keep=1, background=False) as checkpoints:
        strategy.load_state(model, optimizer, checkpoints.newest({}, print))
    return train(strategy, model, optimizer, (1,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "options", "data"),
    [
        pytest.param("llama-tied", 2, {"tp_size": 2}, [(1, 0), (1, 0)], marks=pytest.mark.lane),
        pytest.param("qwen3", 4, {"tp_size": 2}, [(2, 0), (2, 0), (2, 1), (2, 1)], marks=pytest.mark.lane),
        pytest.param("qwen3_moe", 2, {"ep_size": 2}, [(2, 0), (2, 1)], marks=pytest.mark.lane),
        pytest.param("mixtral", 4, {"ep_size": 2}, [(4, 0), (4, 1), (4, 2), (4, 3)], marks=pytest.mark.lane),
        ("qwen3_moe", 4, {"tp_size": 2, "ep_size": 4}, [(2, 0), (2, 0), (2, 1), (2, 1)]),
    ],
)
def test_they_train_as_one_process(name, ranks, options, data, paths, tmp_path):
    """Gradients, losses, norms and weights are one process's; a state goes on here to the bit, in one process and under fsdp2
    alone within rounding; plain transformers loads the export.
    """
    path, options = paths[name], {"strategy": "fsdp2", **options}
    expected = oracle(path)
    found = run_on_ranks(scenario, ranks, path, options, str(tmp_path))
    assert [rank["data"] for rank in found] == data
    for rank in found:
        for weight, grad in expected["gradients"].items():
            assert (rank["gradients"][weight] - grad).abs().max() <= 1e-6 * max(1, grad.abs().max()), weight
        assert rank["norm"][2] == pytest.approx(expected["norm"][2], rel=1e-5)
        for mine, one in zip(rank["steps"], expected["steps"], strict=True):
            assert mine == pytest.approx(one, rel=1e-5)
        assert rank["state"] == expected["state"]
        assert rank["resumed"] == rank["next"]
        assert rank["check"].difference <= rank["check"].tolerance == 1e-5
    for weight, value in expected["weights"].items():
        torch.testing.assert_close(found[0]["weights"][weight], value, rtol=1e-4, atol=1e-5)
    with alone() as single:
        assert resumed(single, path, {"strategy": "single"}, tmp_path)[0] == pytest.approx(found[0]["next"][0], rel=1e-5)
    shutil.copytree(tmp_path / "full_state", tmp_path / "other" / "full_state")
    for other in run_on_ranks(resumed, 2, path, {"strategy": "fsdp2"}, str(tmp_path / "other")):
        assert other[0] == pytest.approx(found[0]["next"][0], rel=1e-5)
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert {key: value.shape for key, value in plain.state_dict().items()} == {
        key: value.shape for key, value in AutoModelForCausalLM.from_pretrained(path).state_dict().items()
    }


@pytest.mark.parametrize(
    ("world_size", "options", "how", "said"),
    [
        (3, {"tp_size": 2}, {}, "tp_size=2 does not divide 3 ranks"),
        (4, {"tp_size": 2, "cp_size": 4}, {}, "tp_size=2 and cp_size=4 do not divide 4 ranks"),
        (4, {"ep_size": 3}, {}, "ep_size=3 does not divide the 4 ranks of a copy"),
        (4, {"tp_size": 4, "ep_size": 2}, {}, "ep_size=2 is no multiple of tp_size=4"),
        (
            8,
            {"strategy": "hsdp", "shard_size": 4, "ep_size": 8},
            {},
            r"divide the 4 ranks of a copy \(shard",
        ),
        (4, {"strategy": "hsdp", "shard_size": 2, "tp_size": 2}, {}, "leaves nothing to shard beside tp_size=2"),
        (2, {"tp_size": 2, "gather_dtype": "bfloat16"}, {}, "gather_dtype='bfloat16' has no effect where all 2 ranks"),
        (2, {"tp_size": 2}, {"adapter": True}, "tp_size=2 divides the layers that an adapter would be put into"),
        (4, {"ep_size": 2}, {"optimizer": "muon"}, "ep_size=2 divides matrices, which muon needs whole"),
        (2, {"tp_size": 2}, {"optimizer": "apollo"}, "tp_size=2 divides matrices, which apollo needs whole"),
        (2, {"tp_size": 2}, {"optimizer": "schedule_free"}, "leaves some weights whole"),
        (1, {"tp_size": 2}, {}, "tp_size=2 has no effect with one rank"),
    ],
)
def test_what_does_not_fit_is_refused(world_size, options, how, said):
    """Before a model is read, by the names of the settings."""
    given = {"device": torch.device("cpu"), "adapter": False, **how}
    with pytest.raises(StrategyError, match=said):
        forge_dist.make_strategy(StrategySettings(**options), Absent(world_size), **given)


@pytest.mark.parametrize("name", ["tp_size", "ep_size"])
def test_ddp_has_neither(name):
    """Whole copies are not divided."""
    with pytest.raises(ValueError, match=f"{name}=2 has no effect with strategy=ddp; leave it out, or use fsdp2, hsdp"):
        StrategySettings(strategy="ddp", **{name: 2})


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("qwen3", {"tp_size": 4}, "tp_size=4 does not divide its 2 num_key_value_heads"),
        ("qwen3", {"ep_size": 2}, "no plan by which experts of Qwen3ForCausalLM are divided"),
        ("mixtral", {"ep_size": 3}, "ep_size=3 does not divide its 4 experts"),
        ("qwen3_moe", {"tp_size": 2}, r"experts.gate_up_proj is several weights in one.*divide its experts by ep_size=2 too"),
    ],
)
def test_models_that_cannot_be_divided(name, sizes, said, paths):
    """Their configuration says so, without a weight being read."""
    with pytest.raises(StrategyError, match=said):
        check_divisible(paths[name], **sizes)


def test_a_model_without_a_plan(tmp_path):
    """transformers divides the layers of the architectures that it has a plan for."""
    import transformers

    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=4, vocab_size=61)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(StrategyError, match="no plan by which layers of GPT2LMHeadModel are divided"):
        check_divisible(str(tmp_path), tp_size=2)
