"""What is saved under one strategy goes on under another; a state that does not fit is refused by name before anything
changes.
"""

import pytest

from ...lanes import ci_keeps
from ...ranks import run_on_ranks
from ..training import Kept, alone, start, train

OPTIONS = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "hsdp": {"strategy": "hsdp", "shard_size": 2},
}
FIRST, LATER = range(2), range(2, 3)


def whole(strategy, model):
    return {name: tensor.clone() for name, tensor in strategy.whole(model) if tensor is not None}


def saved(ranks, path, names, lora=False):
    """strategy → (state after two steps, weights and losses after two more of an uninterrupted run)"""
    done = {}
    for name in names:
        strategy, model, optimizer = start(ranks, path, OPTIONS[name], lora=lora)
        train(strategy, model, optimizer, FIRST)
        kept = Kept.of(strategy.state(model, optimizer))
        losses = train(strategy, model, optimizer, LATER)
        done[name] = (kept, whole(strategy, model), losses)
    return done


def resumed(ranks, path, names, states, lora=False):
    """(strategy, name of the state) → (weights and losses of the two later steps, the state's own names and values after
    loading)
    """
    done = {}
    for name in names:
        for key, kept in states.items():
            strategy, model, optimizer = start(ranks, path, OPTIONS[name], lora=lora)
            if key == "ddp":  # into an optimizer that has moved already
                train(strategy, model, optimizer, range(9, 10))
            strategy.load_state(model, optimizer, kept)
            again = Kept.of(strategy.state(model, optimizer))
            losses = train(strategy, model, optimizer, LATER)
            done[name, key] = (again, whole(strategy, model), losses)
    return done


def saved_and_resumed(ranks, path, names, then, states, lora=False):
    """Both, in one set of ranks: those that were saved here go on here too."""
    new = saved(ranks, path, names, lora)
    return new, resumed(ranks, path, then, states | {name: kept for name, (kept, _, _) in new.items()}, lora)


@pytest.mark.slow
@pytest.mark.parametrize("lora", ci_keeps([False], [pytest.param(False, id="full"), pytest.param(True, id="lora")]))
def test_goes_on_anywhere(save_base, lora):
    """Saved on 1, 2, 3 or 4 ranks, resumed on 1, 2 or 4 under any strategy: every value arrives bit for bit."""
    import torch

    path = save_base("llama-tied")
    with alone() as ranks, torch.random.fork_rng():
        runs = saved(ranks, path, ["single"], lora)
    if not lora:
        runs |= {f"{name} on 3": run for name, run in run_on_ranks(saved, 3, path, ["fsdp2"])[0].items()}
    states, again = {}, {}
    for size, names, others in ((2, ["ddp", "fsdp2"], []), (4, ["hsdp"], ["fsdp2"])):
        states |= {name: kept for name, (kept, _, _) in runs.items()}
        new, found = run_on_ranks(saved_and_resumed, size, path, names, [*names, *others], states, lora)[0]
        runs |= new
        again |= {(str(size), *key): value for key, value in found.items()}
    states = {name: kept for name, (kept, _, _) in runs.items()}
    with alone() as ranks, torch.random.fork_rng():
        again |= {("1", *key): value for key, value in resumed(ranks, path, ["single"], states, lora).items()}
    assert len(again) == (18 if lora else 23)
    for (size, name, key), (arrived, weights, losses) in again.items():
        kept, wanted, wanted_losses = runs[key]
        assert list(arrived) == list(kept), (size, name, key)
        assert all(torch.equal(arrived[n], kept[n]) and arrived[n].dtype == kept[n].dtype for n in kept), (size, name, key)
        exact = (size, name) in {("1", "single"), ("2", "ddp"), ("2", "fsdp2"), ("4", "hsdp")} and name == key
        for tensor, other in ((weights[n], wanted[n]) for n in wanted):
            assert torch.equal(tensor, other) if exact else (tensor - other).abs().max() <= 2e-5, (size, name, key)
        for mine, theirs in zip(losses, wanted_losses, strict=True):
            assert mine == theirs if exact else mine == pytest.approx(theirs, rel=1e-5), (size, name, key)


@pytest.fixture
def ready(base):
    """A strategy, a fresh model with its optimizer, and a state that was saved after a step."""
    with alone() as ranks:
        strategy, model, optimizer = start(ranks, base, OPTIONS["single"])
        train(strategy, model, optimizer, range(1))
        kept = Kept.of(strategy.state(model, optimizer))
        yield *start(ranks, base, OPTIONS["single"]), kept


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kept: kept.pop("model/model.norm.weight"), "lacks model/model.norm.weight"),
        (lambda kept: kept.update({"model/other.weight": kept["model/model.norm.weight"]}), "has model/other.weight"),
        (lambda kept: kept.update({"rng": kept["model/model.norm.weight"]}), "has rng"),
        (lambda kept: kept.pop(f"optimizer/{EMBEDDING}/exp_avg"), f"lacks optimizer/{EMBEDDING}/exp_avg"),
        (lambda kept: kept.update({"optimizer/other/step": kept[f"optimizer/{EMBEDDING}/step"]}), "has optimizer/other/step"),
        (
            lambda kept: kept.update({f"model/{EMBEDDING}": kept[f"model/{EMBEDDING}"][:-1]}),
            rf"{EMBEDDING} is .*\[60, 16\] there",
        ),
        (
            lambda kept: kept.update({f"model/{EMBEDDING}": kept[f"model/{EMBEDDING}"].half()}),
            "float16 .* there and torch.float32",
        ),
    ],
)
def test_what_does_not_fit(ready, damage, message):
    """A name that is missing or too many, another shape or dtype: CheckpointError names it, and nothing was changed."""
    import torch

    from forge_dist import CheckpointError

    strategy, model, optimizer, kept = ready
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    damage(kept)
    with pytest.raises(CheckpointError, match=message):
        strategy.load_state(model, optimizer, kept)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not optimizer.state


@pytest.mark.parametrize("moved", [True, False])
def test_a_state_of_a_version_that_froze_less(ready, moved):
    """A weight that is frozen now and never moved goes on as the state has it; one that did is refused."""
    import torch

    from forge_dist import CheckpointError

    strategy, model, optimizer, kept = ready
    weight = model.model.norm.weight.requires_grad_(requires_grad=False)
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if each is not weight]
    kept["model/model.norm.weight"] = kept["model/model.norm.weight"] + 1
    if moved:
        with pytest.raises(CheckpointError, match=r"the optimizer: it has optimizer/model\.norm\.weight/exp_avg"):
            strategy.load_state(model, optimizer, kept)
        return
    for name in [name for name in kept if name.startswith("optimizer/model.norm.weight/")]:
        del kept[name]
    strategy.load_state(model, optimizer, kept)
    assert torch.equal(weight, kept["model/model.norm.weight"])


def test_what_is_held_already(ready):
    """An optimizer that has moved keeps to its own names: a state that lacks one of them, for every parameter, is refused."""
    from forge_dist import CheckpointError

    strategy, model, optimizer, kept = ready
    train(strategy, model, optimizer, range(1))
    for name in [name for name in kept if name.endswith("/exp_avg")]:
        del kept[name]
    with pytest.raises(CheckpointError, match="the optimizer: it lacks optimizer/.*/exp_avg"):
        strategy.load_state(model, optimizer, kept)


def test_no_tensor(ready):
    """An optimizer that keeps neither tensors nor numbers cannot be saved, and what it has not begun to keep is left out."""
    from forge_dist import CheckpointError

    strategy, model, optimizer, _ = ready
    weight = model.model.norm.weight
    optimizer.state[weight] = {"buffer": None}
    assert "optimizer/model.norm.weight/buffer" not in strategy.state(model, optimizer)
    optimizer.state[weight] = {"rate": [0.5]}
    with pytest.raises(CheckpointError, match=r"keeps rate=\[0.5\] for model.norm.weight, which is neither tensor nor number"):
        strategy.state(model, optimizer)


def test_buffers(ready):
    """Persistent buffers are part of a state, the others (rotary frequencies) are not."""
    import torch

    strategy, model, optimizer, _ = ready
    model.register_buffer("seen", torch.tensor(3))
    model.register_buffer("scratch", torch.tensor(4), persistent=False)
    names = set(strategy.state(model, optimizer))
    assert "model/seen" in names
    assert not any("scratch" in name or "inv_freq" in name for name in names)


def test_shared_memory(ready):
    """A state is no copy: it shares the memory of the model."""
    strategy, model, optimizer, _ = ready
    assert strategy.state(model, optimizer)["model/model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
