"""A second model beside the trained one, which is only asked: divided as that one is, without gradients."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from forge_dist import load_model

from ...ranks import run_on_ranks
from ..divided import by_family, strategy_of
from ..rewards import ROWS, rewards
from ..training import alone, backward, row, start


def ask(model, number):
    with torch.no_grad():
        return model(input_ids=row(9, number), use_cache=False).logits


def held(model):
    """How many numbers of weights lie on this rank."""
    tensors = ((p.to_local() if isinstance(p, DTensor) else p).detach() for p in model.parameters())
    return sum(getattr(p, "ds_tensor", p).numel() for p in tensors if p is not None), sum(
        p.ds_tensor.numel() for p in model.parameters() if hasattr(p, "ds_tensor")
    )


def scenario(ranks, names, trained, teacher, reward):
    """name → what a frozen teacher and reward model say between and within steps of training, and what they hold afterwards."""
    found = {}
    for name in names:
        strategy, model, optimizer = start(ranks, trained, {"strategy": name})
        frozen = strategy.load_frozen(teacher, dtype=torch.float32)
        judge = strategy.load_frozen(reward, dtype=torch.float32, task="reward")
        with strategy.computing(frozen):  # it is probed so
            message = [ask(frozen, ranks.rank)]
        values = [rewards(judge)]
        losses = []
        for step in range(2):
            strategy.zero_grad(optimizer)
            losses.append(backward(strategy, model, step))
            message.append(ask(frozen, ranks.rank))  # between backward and step
            strategy.step(optimizer)
        values.append(rewards(judge))
        with torch.enable_grad():
            graph = frozen(input_ids=row(9, 0), use_cache=False).logits.requires_grad
        first, partitioned = held(frozen)
        found[name] = {
            "message": message,
            "rewards": values,
            "losses": losses,
            "graph": graph,
            "held": partitioned or first,
            "modes": (frozen.training, judge.training, model.training),
            "trains": any(p.requires_grad for p in [*frozen.parameters(), *judge.parameters()]),
        }
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory, make_model):
    """Directories of a model to train, a teacher with other weights, and a reward model."""
    where = tmp_path_factory.mktemp("frozen")
    make_model("llama-tied").save_pretrained(where / "trained")
    make_model("llama-untied", seed=1).save_pretrained(where / "teacher")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        load_model(str(where / "trained"), dtype=torch.float32, device="cpu", task="reward").save_pretrained(where / "reward")
    return [str(where / name) for name in ("trained", "teacher", "reward")]


@pytest.fixture(scope="module")
def alone_found(paths):
    """The same in one process."""
    with alone() as ranks:
        return scenario(ranks, ["single"], *paths)["single"]


@pytest.mark.slow
@by_family
def test_on_two_ranks(paths, alone_found, names):
    """All ranks ask, each its own row, before, within and after training steps: always what the files say; no graph, no
    gradients.
    """
    teacher = load_model(paths[1], dtype=torch.float32, device="cpu")
    whole = sum(p.numel() for p in teacher.parameters())
    for rank, reported in enumerate(run_on_ranks(scenario, 2, names, *paths)):
        for name, found in reported.items():
            expected = ask(teacher, rank)
            assert all((message - expected).abs().max() < 1e-5 for message in found["message"]), (name, rank)
            for values in found["rewards"]:
                assert values == pytest.approx(alone_found["rewards"][0], rel=1e-5), (name, rank)
            assert found["losses"] == pytest.approx(alone_found["losses"], rel=1e-5), (name, rank)
            assert not found["graph"], name
            assert not found["trains"], name
            assert found["modes"] == (False, False, True), name
            divided = name in ("fsdp2", "zero3")
            assert (found["held"] < 0.6 * whole) == divided, (name, found["held"], whole)


def test_alone(alone_found):
    """In one process too, and the trained model is another one: it changes."""
    assert not alone_found["graph"]
    assert all(torch.equal(message, alone_found["message"][0]) for message in alone_found["message"])
    assert len(alone_found["rewards"][0]) == len(ROWS)
    assert alone_found["losses"][0] != alone_found["losses"][1]


@pytest.mark.slow
def test_whole_weights_are_put_away(paths):
    """After a forward, FSDP keeps no whole weights of a frozen model: no backward will free them."""
    assert run_on_ranks(shards_after_a_forward, 2, paths[1]) == [True, True]


def shards_after_a_forward(ranks, path):
    frozen = strategy_of(ranks, "fsdp2").load_frozen(path, dtype=torch.float32)
    ask(frozen, 0)
    return all(isinstance(p, DTensor) for p in frozen.parameters())
