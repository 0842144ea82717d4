"""Layers and experts divided over ranks (tp_size, ep_size): trained, saved, resumed and exported as in one process."""

import shutil
from pathlib import Path

import pytest
import torch

import forge_dist
from forge_dist import Checkpoints

from ....ranks import run_on_ranks
from ...divided import SAMPLES
from ...training import alone, oracle, report, start, train

MIXTURES = ("qwen3_moe", "mixtral")


def mixture(kind):
    """A tiny mixture of experts with random weights."""
    import transformers

    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
    }
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
    with Checkpoints(Path(directory, "full_state"), ranks, keep=1, background=False) as checkpoints:
        checkpoints.save(1, strategy.state(model, optimizer), {})
        state = checkpoints.last_good
    found["next"] = train(strategy, model, optimizer, (1,))
    strategy, model, optimizer = start(ranks, path, options)
    with Checkpoints(Path(directory, "full_state"), ranks, keep=1, background=False) as checkpoints:
        strategy.load_state(model, optimizer, checkpoints.at(state, {}))
    found["resumed"] = train(strategy, model, optimizer, (1,))
    where = forge_dist.export_model(model, Path(directory, "exported"), strategy=strategy)
    found["check"] = forge_dist.check_export(model, where, SAMPLES, strategy=strategy)
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
        ("llama-tied", 2, {"tp_size": 2}, [(1, 0), (1, 0)]),
        ("qwen3", 4, {"tp_size": 2}, [(2, 0), (2, 0), (2, 1), (2, 1)]),
        ("qwen3_moe", 2, {"ep_size": 2}, [(2, 0), (2, 1)]),
        ("mixtral", 4, {"ep_size": 2}, [(4, 0), (4, 1), (4, 2), (4, 3)]),
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
