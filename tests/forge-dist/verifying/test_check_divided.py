"""An export of a divided model is proved on all ranks, or refused on all of them."""

import json
import random
import shutil
from pathlib import Path

import attrs
import pytest
import torch

from forge_dist import check_export, export_model, load_model
from forge_dist.verifying import _reload

from ...ranks import run_on_ranks
from ..divided import SAMPLES, adapted, changed, ready, strategy_of, zero
from ..exporting.test_export_divided import refused
from ..exporting.test_layout import mixture

pytestmark = pytest.mark.slow


def passes(ranks, path, directory, names, kinds):
    """For each strategy and kind (lora, dtype of the export): what the check found, and whether the run goes on unchanged."""
    found = {}
    for name in names:
        for lora, dtype in kinds:
            strategy = strategy_of(ranks, name.removesuffix(OFFLOADED), adapter=lora)
            if name.endswith(OFFLOADED):
                offload_copies(strategy)
            wrapped, inner = ready(strategy, path, lora=lora)
            torch.manual_seed(3)
            random.seed(3)
            before = noted(strategy, wrapped, inner)
            where = export_model(wrapped, Path(directory, f"{name}-{lora}-{dtype}"), dtype=dtype, strategy=strategy)
            check = check_export(wrapped, where, SAMPLES, strategy=strategy)
            same = noted(strategy, wrapped, inner) == before
            found[name, lora, dtype] = (check, same, step_on(strategy, wrapped))
    return found


OFFLOADED = " with its copy on the host"


def offload_copies(strategy):
    """Load second copies as beside an accelerator, of which there is none: DeepSpeed keeps their parts on the host."""

    def loader(strategy, *, quantized, adapter):
        made = strategy_of(strategy.ranks, strategy.name)
        # It is refused on a CPU, where it has no effect.
        made.settings = attrs.evolve(made.settings, cpu_offload=True)
        return made

    _reload._loader = loader


def noted(strategy, wrapped, inner):
    """All that a check must leave as it was."""
    state = {name: local(tensor) for name, tensor in inner.state_dict().items()}
    if strategy.name == "zero3":  # which leaves small weights whole once they have been used
        state = {name: tensor for name, tensor in strategy.whole(wrapped) if tensor is not None}
    return (
        torch.random.get_rng_state().tolist(),
        random.getstate(),
        [module.training for module in wrapped.modules()],
        inner.config._attn_implementation,
        {name: tensor.flatten().tolist() for name, tensor in state.items()},
        torch.is_grad_enabled(),
    )


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step_on(strategy, wrapped):
    """The gradient norm of a training pass after the check."""
    ids = torch.tensor([SAMPLES[1][0]])
    strategy.zero_grad(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    with strategy.micro_batch(True):
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss / strategy.world_size
        strategy.backward(loss)
    return float(strategy.grad_norm([p for p in wrapped.parameters() if p.requires_grad]))


def expected_of(path, directory, lora, dtype):
    """The same of one process."""
    model = load_model(path, dtype=torch.float32, device="cpu")
    if lora:
        model = adapted(model)
    else:
        changed(model.parameters())
    model.train()
    check = check_export(model, export_model(model, directory, dtype=dtype), SAMPLES)
    ids = torch.tensor([SAMPLES[1][0]])
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return check, torch.stack([grad.norm() for grad in grads]).norm().item()


KINDS = [(False, None), (False, torch.bfloat16), (True, torch.bfloat16)]


def compare(path, tmp_path, names, world_size, kinds=KINDS):
    on_ranks = run_on_ranks(passes, world_size, path, str(tmp_path), names, kinds)
    for lora, dtype in kinds:
        expected, norm = expected_of(path, tmp_path / f"alone-{lora}-{dtype}", lora, dtype)
        for name in names:
            for rank in on_ranks:
                check, same, after = rank[name, lora, dtype]
                assert same, name
                assert check == on_ranks[0][name, lora, dtype][0]
                assert (check.tensors, check.loss_tokens, check.tolerance) == (expected.tensors, 15, expected.tolerance)
                assert check.in_memory == pytest.approx(expected.in_memory, rel=1e-6)
                assert check.reloaded == pytest.approx(expected.reloaded, rel=1e-6)
                assert check.difference == pytest.approx(expected.difference, abs=1e-6)
                assert after == pytest.approx(norm, rel=1e-5), name


def test_two_ranks_find_what_one_process_finds(save_base, tmp_path):
    """Losses, tensors and bounds are those of one process, the same on both ranks, and training goes on as if nothing had
    been.
    """
    compare(save_base("llama-tied"), tmp_path, ["ddp", "fsdp2"], 2)


@pytest.mark.lane
def test_four_ranks_find_what_one_process_finds(save_base, tmp_path):
    """The same where copies of the model are each divided, and where parts are of unequal sizes."""
    compare(save_base("gemma3"), tmp_path, ["hsdp", "fsdp2"], 4, KINDS[1:])


@zero
def test_zero_finds_what_one_process_finds(save_base, tmp_path):
    """The same under DeepSpeed, whose third stage leaves no weight whole between forwards."""
    compare(save_base("llama-tied"), tmp_path, ["zero2", "zero3", f"zero3{OFFLOADED}"], 2, KINDS[1:])


def planted(ranks, path, directory):
    """What each rank reports of exports and models that were changed in one place."""
    reported = {}
    for name in ("ddp", "fsdp2"):
        strategy = strategy_of(ranks, name)
        wrapped, inner = ready(strategy, path)
        good = export_model(wrapped, Path(directory, name), strategy=strategy)

        def told_of(change, good=good, name=name, strategy=strategy, wrapped=wrapped):
            where = Path(directory, f"{name}-{change.__name__}")
            if ranks.is_first:
                shutil.copytree(good, where)
                change(where)
            ranks.barrier()
            return refused(check_export, wrapped, where, SAMPLES, strategy=strategy)

        for change in (nothing, a_bit, no_weights, cut_short, another_config, slightly_another_config, no_config):
            reported[name, change.__name__] = told_of(change)
        if ranks.rank == 1:
            real, strategy.load = strategy.load, missing
        reported[name, "one rank"] = told_of(nothing_more)
        if ranks.rank == 1:
            strategy.load = real
        # A weight of the last rank alone: under ddp it has drifted, under fsdp2 it is part of the one model there is.
        weight = local(inner.model.layers[1].mlp.up_proj.weight)
        with torch.no_grad():
            if ranks.rank == ranks.world_size - 1:
                weight.mul_(1.5)
        reported[name, "memory"] = told_of(nothing_again)
        reported[name, "unlearned"] = refused(check_export, wrapped, good, [([1, 2], [-100, -100])], strategy=strategy)
    return reported


def missing(*_args, **_kwargs):
    raise OSError("a disk that only rank 1 has is gone")


def nothing(where):
    pass


def nothing_again(where):
    pass


def nothing_more(where):
    pass


def a_bit(where):
    weights = where / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)


def no_weights(where):
    (where / "model.safetensors").unlink()


def cut_short(where):
    weights = where / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def edited(where, **changes):
    file = where / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def another_config(where):
    edited(where, hidden_act="relu")


def slightly_another_config(where):
    edited(where, rms_norm_eps=1e-3)


def no_config(where):
    (where / "config.json").unlink()


@pytest.fixture(scope="module")
def reported(tmp_path_factory, make_model):
    """What each of two ranks reported."""
    where = tmp_path_factory.mktemp("planted")
    make_model("qwen3").save_pretrained(where / "base")
    return run_on_ranks(planted, 2, str(where / "base"), str(where))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a_bit", "is not the one in memory"),
        ("no_weights", "holds neither model.safetensors"),
        ("cut_short", "is not a whole safetensors file"),
        ("another_config", "nats per token instead of"),
        ("slightly_another_config", "nats per token instead of"),
        ("no_config", "config.json"),
        ("unlearned", "has a learned token"),
    ],
)
def test_a_planted_difference_is_found_on_all_ranks(reported, name, what, message):
    """Whatever differs in the directory, every rank refuses it with the same message."""
    # One that another rank than the first found says whose it was.
    assert reported[0][name, what][1].removesuffix(" (rank 1)") == reported[1][name, what][1]
    kind, found = reported[0][name, what]
    assert kind == "ExportError"
    assert message in found


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_what_was_not_changed_passes(reported, name):
    """The same directory, copied, is refused on no rank."""
    assert reported[0][name, "nothing"] is reported[1][name, "nothing"] is None


def test_a_part_that_changed_is_found(reported):
    """Under fsdp2 the weights of the last rank are compared too."""
    for rank in reported:
        assert "model.layers.1.mlp.up_proj.weight is not the one in memory" in rank["fsdp2", "memory"][1]


def test_a_copy_that_drifted_is_found(reported):
    """Under ddp the one file is rank 0's, and is compared with the weights of another rank, which differ: all hear of it."""
    assert "up_proj.weight is not the one in memory" in reported[1]["ddp", "memory"][1]
    assert reported[0]["ddp", "memory"] == ["ExportError", reported[1]["ddp", "memory"][1] + " (rank 1)"]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_one_rank_that_cannot_read_is_reported(reported, name):
    """A directory that one rank does not see is an error on all, and nobody waits for it."""
    assert "a disk that only rank 1 has is gone (rank 1)" in reported[0][name, "one rank"][1]
    assert "a disk that only rank 1 has is gone" in reported[1][name, "one rank"][1]


def halves(ranks, path, mixture_path, directory):
    """Checks of models that are held or put together in 16 bits, and of one whose experts lie together."""
    found = []
    strategy = strategy_of(ranks, "fsdp2")
    for base, dtype in ((path, torch.bfloat16), (mixture_path, torch.float32)):
        wrapped, _ = ready(strategy, base, dtype=dtype)
        where = export_model(wrapped, Path(directory, str(dtype)), strategy=strategy)
        found.append(check_export(wrapped, where, SAMPLES, strategy=strategy))
    strategy = strategy_of(ranks, "fsdp2", gather_dtype="bfloat16")
    wrapped, _ = ready(strategy, path)
    where = export_model(wrapped, Path(directory, "gathered"), strategy=strategy)
    return [*found, check_export(wrapped, where, SAMPLES, strategy=strategy)]


def test_models_in_16_bits_and_of_experts(save_base, tmp_path):
    """A model in bfloat16, one whose weights are gathered in it, and a mixture of experts pass, each within its bound."""
    mixture().save_pretrained(tmp_path / "mixtral")
    half, experts, gathered = run_on_ranks(halves, 2, save_base(), str(tmp_path / "mixtral"), str(tmp_path))[0]
    assert half.in_memory == half.reloaded
    assert half.tolerance == gathered.tolerance == 2e-2
    assert gathered.difference < 1e-3
    assert experts.difference <= 1e-6
    assert experts.tensors > 30
