"""Each optimizer takes its library's own steps, decays matrices alone, and resumes exactly."""

import copy
import sys

import attrs
import pytest
import torch

from forge_algos import (
    SFT,
    AdapterSettings,
    DivergedError,
    MissingPackageError,
    OptimizerError,
    OptimizerSettings,
    adamw,
    adapt,
    make_optimizer,
    schedule,
    train,
)

from ..oracle import make, pack, samples

LR, DECAY = 0.01, 0.3
COMMON = {"learning_rate": LR, "weight_decay": DECAY, "lr_scheduler": "constant"}
NAMES = ("adamw", "adafactor", "muon", "schedule_free", "adamw_8bit", "apollo", "apollo_mini")
PACKAGES = {"schedule_free": "schedulefree", "adamw_8bit": "bitsandbytes"}


def config_of(name, **changes):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"{PACKAGES[name]} is an optional package")
    return OptimizerSettings(optimizer=name, **{**COMMON, **changes})


def big():
    """Return a model with a matrix above 4,096 numbers, from where bitsandbytes uses 8 bits."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(256, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 5, bias=False))


def move(optimizer, model, *, steps=3, seed=0):
    """Take steps with made-up gradients, in the optimizer's own training mode."""
    generator = torch.Generator().manual_seed(seed)
    getattr(optimizer, "train", lambda: None)()
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    getattr(optimizer, "eval", lambda: None)()
    return [p.detach().clone() for p in model.parameters()]


def decayed(model):
    """Return the decayed and the other parameters of every optimizer but Muon."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def library(name, model):
    """Return the library's own optimizer."""
    adam = {"lr": LR, "betas": (0.8, 0.7), "eps": 1e-3}
    if name == "adamw":
        return torch.optim.AdamW(decayed(model), **adam)
    if name == "adafactor":
        return torch.optim.Adafactor(decayed(model), lr=LR)
    if name == "schedule_free":
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree(decayed(model), **adam)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(decayed(model), **adam)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "schedule_free", "adamw_8bit"])
def test_steps_are_the_librarys(name):
    """Three steps have the bits of the library's own optimizer.
    Matrices with decay and vectors without.
    """
    read = {} if name == "adafactor" else {"beta1": 0.8, "beta2": 0.7, "eps": 1e-3}
    config = config_of(name, **read)
    ours, theirs = big(), big()
    found = move(make_optimizer(ours, config), ours)
    expected = move(library(name, theirs), theirs)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    assert not torch.equal(found[0], next(big().parameters()))


@pytest.mark.parametrize("fused", [False, True])
def test_muon_takes_the_librarys_steps_on_each_part(fused):
    """Muon's matrices and AdamW's rest have the bits of torch's Muon and AdamW.
    With one rate; embeddings, head and norms are AdamW's.
    """
    config = config_of("muon", beta1=0.8, beta2=0.7, eps=1e-3, momentum=0.9)
    ours, theirs = make("llama-untied"), make("llama-untied")
    found = move(make_optimizer(ours, config, fused=fused), ours)
    named = dict(theirs.named_parameters())
    layers = [p for n, p in named.items() if "layers" in n and p.dim() == 2]
    tables = [named["model.embed_tokens.weight"], named["lm_head.weight"]]
    norms = [p for p in named.values() if p.dim() == 1]
    muon = torch.optim.Muon(layers, lr=LR, weight_decay=DECAY, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": tables, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.7), eps=1e-3, fused=fused)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in theirs.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        muon.step()
        adam.step()
    assert all(torch.equal(mine, other) for mine, other in zip(found, theirs.parameters(), strict=True))


def test_muon_leaves_tables_and_heads_to_adamw():
    """What is no matrix of a numbered layer is AdamW's; LoRA's matrices are Muon's.
    Tables, heads, norms, stacks of matrices.
    """
    model = make("llama-tied")
    model.score = torch.nn.Linear(16, 1)
    model.model.layers[0].experts = torch.nn.Parameter(torch.zeros(2, 3, 4))
    model.model.layers[0].table = torch.nn.Embedding(3, 4)
    optimizer = make_optimizer(model, config_of("muon"))
    names = {id(p): name for name, p in model.named_parameters()}
    held = {g["algorithm"]: set() for g in optimizer.param_groups}
    for group in optimizer.param_groups:
        held[group["algorithm"]] |= {names[id(p)] for p in group["params"]}
        assert group["lr"] == LR
        assert group["weight_decay"] == (DECAY if group["params"][0].dim() >= 2 else 0.0)
    assert held["muon"] == {n for n in names.values() if n.endswith("proj.weight")}
    assert {"score.weight", "model.layers.0.experts", "model.layers.0.table.weight", "model.norm.weight"} <= held["adamw"]
    assert held["muon"] | held["adamw"] == set(names.values())
    lora = adapt(make(), AdapterSettings(adapter="lora")).model
    assert [g["algorithm"] for g in make_optimizer(lora, config_of("muon")).param_groups] == ["muon"]


def test_muon_without_a_part_is_refused():
    """Muon without matrices is refused, and AdamW's settings where it has no parameters."""
    with pytest.raises(OptimizerError, match="no numbered layer of the model has a matrix"):
        make_optimizer(torch.nn.Linear(3, 2), config_of("muon"))
    lora = adapt(make(), AdapterSettings(adapter="lora")).model
    with pytest.raises(OptimizerError, match="beta2=0.8 has no effect: all that is trained are matrices"):
        make_optimizer(lora, config_of("muon", beta2=0.8))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_continues_to_the_bit(name):
    """A saved and loaded state continues with the bits of an uninterrupted run.
    Two steps, a `state_dict` through pickling into a fresh optimizer, two steps more.
    """
    config = config_of(name)
    whole, first = big(), big()
    going = make_optimizer(whole, config)
    move(going, whole, steps=2)
    expected = move(going, whole, steps=2, seed=1)
    before = make_optimizer(first, config)
    move(before, first, steps=2)
    saved = copy.deepcopy((first.state_dict(), before.state_dict()))
    second = big()
    second.load_state_dict(saved[0])
    after = make_optimizer(second, attrs.evolve(config, learning_rate=0.5))
    after.load_state_dict(saved[1])
    assert after.param_groups[0]["lr"] == LR
    found = move(after, second, steps=2, seed=1)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    assert_states_equal(after.state_dict(), going.state_dict())


def assert_states_equal(ours, theirs):
    """Check the same keys, numbers and tensors, to the bit, at any depth."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_states_equal(ours[key], theirs[key])
    elif isinstance(ours, list):
        for mine, other in zip(ours, theirs, strict=True):
            assert_states_equal(mine, other)
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_uninterrupted_one(name):
    """A resumed run has the losses and weights of an uninterrupted one, to the bit.
    Two steps, saved model, optimizer and schedule, two more.
    """
    config = config_of(name, **({} if name == "schedule_free" else {"lr_scheduler": "cosine"}), warmup_steps=2)
    data = [[pack(samples((5, 9, 7), seed=step))] for step in range(4)]

    def go(model, steps, saved=None, first_step=1):
        optimizer = make_optimizer(model, config)
        scheduler = schedule(optimizer, config, 4)
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            scheduler.load_state_dict(saved[2])
        outputs = train(model, steps, objective=SFT(), optimizer=optimizer, scheduler=scheduler, first_step=first_step)
        losses, states = [], []
        for output in outputs:
            losses.append((output.step, output.loss, output.grad_norm, output.learning_rate))
            states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict())))
        return losses, states

    losses, states = go(make(), data)
    again, ended = go(make(seed=9), data[2:], states[1], first_step=3)
    assert again == losses[2:]
    assert_states_equal(dict(ended[-1][0]), dict(states[-1][0]))


def test_schedule_free_is_out_of_its_training_mode_at_every_yield():
    """Between steps the model has the averaged weights, which are evaluated and saved.
    After a stop and a closed generator too.
    """
    config = config_of("schedule_free")
    model = make()
    optimizer = make_optimizer(model, config)
    steps = [[pack(samples((5, 9, 7), seed=step))] for step in range(3)]
    modes = []
    model.model.norm.register_forward_hook(lambda *_: modes.append(optimizer.param_groups[0]["train_mode"]))
    outputs = train(model, steps, objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, config, 3))
    for _ in range(2):
        next(outputs)
        assert [g["train_mode"] for g in optimizer.param_groups] == [False, False]
    outputs.close()
    assert modes[-2:] == [True, True]
    assert [g["train_mode"] for g in optimizer.param_groups] == [False, False]
    averaged = next(model.parameters()).detach().clone()
    optimizer.train()
    assert not torch.equal(averaged, next(model.parameters()))
    model.model.norm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(DivergedError):
        next(train(model, steps, objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, config, 3)))
    assert [g["train_mode"] for g in optimizer.param_groups] == [False, False]
    torch.testing.assert_close(averaged, next(model.parameters()).detach())


def test_schedule_frees_warmup_is_the_schedules():
    """The schedule's warm-up gives the steps of the library's own warm-up."""
    config = config_of("schedule_free", warmup_steps=3, weight_decay=0.0)
    ours, theirs = big(), big()
    optimizer = make_optimizer(ours, config)
    scheduler = schedule(optimizer, config, 5)
    from schedulefree import AdamWScheduleFree

    library_own = AdamWScheduleFree(theirs.parameters(), lr=LR, betas=(0.9, 0.95), warmup_steps=3)
    for step in range(5):
        found = move(optimizer, ours, steps=1, seed=step)
        scheduler.step()
        expected = move(library_own, theirs, steps=1, seed=step)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_missing_package_is_named(name, monkeypatch):
    """A missing package is an error with the command; an ImportError and bad input."""
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    monkeypatch.setitem(sys.modules, f"{PACKAGES[name]}.optim", None)
    with pytest.raises(MissingPackageError, match=rf"pip install 'forge-algos\[{PACKAGES[name]}\]'") as caught:
        make_optimizer(big(), OptimizerSettings(optimizer=name, lr_scheduler="constant"))
    assert isinstance(caught.value, ImportError)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("how", ["raises", "does nothing"])
def test_a_device_without_8_bit_steps_is_refused(how, monkeypatch):
    """A device on which bitsandbytes takes no step, or one without effect, is refused by name.
    Before training.
    """

    def unserved(*_, **__):
        if how == "raises":
            raise NotImplementedError("no kernel for this device")

    stand_in = type(sys)("bitsandbytes")
    stand_in.functional = type(sys)("bitsandbytes.functional")
    stand_in.functional.create_dynamic_map = lambda signed: torch.zeros(256)
    stand_in.functional.optimizer_update_8bit_blockwise = unserved
    monkeypatch.setitem(sys.modules, "bitsandbytes", stand_in)
    with pytest.raises(OptimizerError, match="bitsandbytes does not serve cpu.*optimizer=adamw"):
        make_optimizer(big(), OptimizerSettings(optimizer="adamw_8bit"))


def test_8_bits_are_8_bits():
    """The large matrix's moments take one byte a number, the vectors' four."""
    config = config_of("adamw_8bit")
    model = big()
    optimizer = make_optimizer(model, config)
    move(optimizer, model, steps=1)
    dtypes = [optimizer.state[p]["state1"].dtype for p in model.parameters()]
    assert dtypes == [torch.uint8, torch.float32, torch.float32, torch.float32, torch.float32]


@pytest.mark.parametrize("fused", [False, True])
def test_two_steps_by_hand(fused):
    """Two steps are arXiv 1711.05101, algorithm 2, written out; plain and fused."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    config = OptimizerSettings(learning_rate=0.1, weight_decay=0.5, beta1=0.8, beta2=0.7, eps=1e-3)
    optimizer = adamw(model, config, fused=fused)
    expected = {n: p.detach().double() for n, p in model.named_parameters()}
    m = {n: torch.zeros_like(p) for n, p in expected.items()}
    v = {n: torch.zeros_like(p) for n, p in expected.items()}
    for step in (1, 2):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            g = parameter.grad.double()
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.7 * v[name] + 0.3 * g**2
            decay = 0.5 if parameter.dim() >= 2 else 0.0
            expected[name] = expected[name] * (1 - 0.1 * decay)
            expected[name] -= 0.1 * (m[name] / (1 - 0.8**step)) / ((v[name] / (1 - 0.7**step)).sqrt() + 1e-3)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_norms_and_biases_do_not_decay():
    """Two groups hold every parameter once; the second, of vectors, has no decay."""
    model = make("llama-tied")
    with_decay, plain = adamw(model, OptimizerSettings(weight_decay=0.3)).param_groups
    assert (with_decay["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in plain["params"]} == {1}
    held = [id(p) for group in (with_decay, plain) for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_frozen_parameters_are_excluded():
    """With an adapter only its parameters train, at their own default rate."""
    model = adapt(make(), AdapterSettings(adapter="lora")).model
    (group,) = adamw(model, OptimizerSettings()).param_groups
    assert len(group["params"]) == sum(p.requires_grad for p in model.parameters())
    assert group["lr"] == 2e-4
    assert adamw(make(), OptimizerSettings()).param_groups[0]["lr"] == 2e-5


def test_adamw_makes_adamw_only():
    """`adamw` refuses settings of another optimizer."""
    with pytest.raises(ValueError, match="optimizer='adafactor'; make_optimizer"):
        adamw(make(), OptimizerSettings(optimizer="adafactor"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_learns(name):
    """Forty steps on the same samples take most of the loss away.

    Adafactor at three tenths of the rate that its default has relative to AdamW's, 0.15: at 0.5 it swings, and where it is in
    the end is rounding's.
    """
    scale = 0.3 * OptimizerSettings(optimizer="adafactor").resolve().learning_rate / 2e-5 if name == "adafactor" else 1.0
    config = config_of(name, learning_rate=LR * scale, weight_decay=0.0)
    model, batch = make(), pack(samples((5, 9, 7)))
    optimizer = make_optimizer(model, config)
    losses = [
        output.loss
        for output in train(
            model, [[batch]] * 40, objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, config, 40)
        )
    ]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("adapter", [{"adapter": "lora", "lora_r": 8}, {"adapter": "osft", "unfreeze_rank_ratio": 0.5}])
def test_adafactor_moves_what_begins_at_zero(adapter):
    """At the default rates Adafactor moves LoRA's B and OSFT's direct form by what AdamW moves them: a step of its rate."""
    moved = {}
    for name in ("adamw", "adafactor"):
        model = adapt(make(), AdapterSettings(**adapter)).model
        zero = [p for p in model.parameters() if p.requires_grad and not p.detach().any()]
        assert zero
        config = OptimizerSettings(optimizer=name, weight_decay=0.0, lr_scheduler="constant")
        optimizer, batch = make_optimizer(model, config), pack(samples((5, 9, 7)))
        for _ in train(model, [[batch]], objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, config, 1)):
            pass
        moved[name] = float(torch.cat([p.detach().flatten() for p in zero]).square().mean().sqrt())
    assert 0.3 < moved["adafactor"] / moved["adamw"] < 3
