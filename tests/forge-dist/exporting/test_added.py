"""A module that a run added to its model: trained, in full states, left out of exports by its name."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge_dist import ExportError, check_export, export_model, load_model

from ...ranks import run_on_ranks
from ..divided import SAMPLES, adapted, by_family, strategy_of
from ..training import Kept, alone, row

HEAD = ("value_head",)


def add(model):
    """A value head in float32 on the transformers model, used inside its forward; its values go into the list."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    with torch.random.fork_rng():
        torch.manual_seed(3)
        base.value_head = torch.nn.Linear(16, 1)
    values = []
    base.lm_head.register_forward_hook(lambda _module, args, _output: values.append(base.value_head(args[0].float())))
    return values


def trained(strategy, path, lora, kept=None):
    """(called model, optimizer, its state) after a step, or with the state `kept`."""
    model = strategy.load(path, dtype=torch.float32)
    if lora:
        strategy.settle(model)
        model = adapted(model)
    values = add(model)
    model, optimizer = strategy.wrap(
        model, lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
    )
    if kept is not None:
        strategy.load_state(model, optimizer, kept)
    else:
        model.train()
        strategy.zero_grad(optimizer)
        with strategy.micro_batch(last=True):
            logits = model(input_ids=row(0, strategy.ranks.rank), use_cache=False).logits
            strategy.backward(logits.square().mean() + values[-1].square().mean())
        strategy.step(optimizer)
    values.clear()
    return model, optimizer, Kept.of(strategy.state(model, optimizer))


def scenario(ranks, names, path, directory, states):
    """name, lora → what was saved, the check, what was refused; and each of the `states` read and given back."""
    found = {}
    for name in names:
        for lora in (False, True):
            strategy = strategy_of(ranks, name, adapter=lora)
            model, _, saved = trained(strategy, path, lora)
            where = Path(directory, f"{name}-{lora}")
            export_model(model, where, strategy=strategy, without=HEAD)
            check = check_export(model, where, SAMPLES, strategy=strategy, without=HEAD)
            try:
                check_export(model, where, SAMPLES, strategy=strategy)
                reported = ""
            except ExportError as error:
                reported = str(error)
            again = trained(strategy_of(ranks, name, adapter=lora), path, lora, states[lora] or saved)[2]
            found[name, lora] = saved, check, reported, again
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory, make_model):
    """In one process: (path of the base, folder of the exports, what `scenario` found)."""
    where = tmp_path_factory.mktemp("added")
    make_model("llama-untied").save_pretrained(where / "base")
    with alone() as ranks:
        return str(where / "base"), where, scenario(ranks, ["single"], str(where / "base"), where, [None, None])


def proved(found, where, base):
    for (name, lora), (saved, check, reported, again) in found.items():
        trained_head = [key for key in saved if key.startswith("model/") and "value_head" in key]
        assert len(trained_head) == 2, (name, lora)
        assert not any("lora" in key for key in saved) or lora
        assert check.difference <= 1e-5, (name, lora)
        assert "value_head" in reported, (name, lora)
        assert again.keys() == saved.keys(), (name, lora)
        if lora:
            from peft import PeftModel

            plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), where / f"{name}-{lora}")
        else:
            plain, report = AutoModelForCausalLM.from_pretrained(where / f"{name}-{lora}", output_loading_info=True)
            assert not any(report.values()), (name, report)
        assert not any("value_head" in key for key in plain.state_dict())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_alone(one):
    """The export is the plain model, proved; without the name the proof says what is too many; the full state has the
    addition.
    """
    base, where, found = one
    proved(found, where, base)
    for saved, _, _, again in found.values():
        assert all(torch.equal(saved[key], again[key]) for key in saved)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@by_family
def test_on_two_ranks(one, names, tmp_path):
    """The same where the model is copied or divided, beside a frozen base too; the state of one process arrives bit for bit."""
    base, _, single = one
    states = [single["single", False][0], single["single", True][0]]
    for found in run_on_ranks(scenario, 2, names, base, str(tmp_path), states):
        proved(found, tmp_path, base)
        for (name, lora), (_, _, _, again) in found.items():
            assert all(torch.equal(states[lora][key], again[key]) for key in again), (name, lora)
    for lora in (False, True):  # and back
        saved = found[names[-1], lora][0]
        with alone() as ranks:
            again = trained(strategy_of(ranks, "single", adapter=lora), base, lora, saved)[2]
        assert again.keys() == saved.keys()
        assert all(torch.equal(saved[key], again[key]) for key in saved)


def test_names_that_are_not_there(base, tmp_path):
    """A module that the model has not, or a bare string, is an error before anything is written."""
    model = load_model(base, dtype=torch.float32, device="cpu")
    for function in (export_model, lambda *a, **k: check_export(*a, SAMPLES, **k)):
        with pytest.raises(ExportError, match="without names 'value_head', and the model has no such module"):
            function(model, tmp_path / "out", without=HEAD)
        with pytest.raises(ExportError, match="must be a sequence of names"):
            function(model, tmp_path / "out", without="value_head")
    assert not (tmp_path / "out").exists()
