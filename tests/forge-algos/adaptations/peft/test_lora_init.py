"""LoRA's first values, LoRA+, LoRA-FA and ranks by layer: beside PEFT's own, and the paper's formulas."""

import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from peft.tuners.lora import EvaConfig, initialize_lora_eva_weights
from torch import distributed
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_algos import (
    SFT,
    AdapterError,
    AdapterSettings,
    OptimizerError,
    OptimizerSettings,
    adapt,
    eva_directions,
    make_optimizer,
    schedule,
    train,
)

from ....lanes import ci_keeps
from ...oracle import make, pack, samples
from .test_attach import IDS, logits, saved, state
from .test_quantization import load, needs_bitsandbytes

INITS = ("default", "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_16", "mica", "eva")
# In CI each initialisation with lora, and one of those that are subtracted with the other scales.
CASES = ci_keeps(
    [*((init, "lora") for init in ("default", "orthogonal", "pissa", "mica", "eva")), ("pissa", "rslora"), ("pissa", "dora")],
    [(init, adapter) for init in INITS for adapter in ("lora", "rslora", "dora")],
)
ROW = pack(samples([6, 9, 4, 12], learned=1.0))


@pytest.fixture
def a_mesh():
    """A mesh of this process alone, over which weights can be divided."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def settings_of(init, **more):
    return AdapterSettings(**{"adapter": "lora", "lora_r": 4, "lora_alpha": 6.0, "init_lora_weights": init, **more})


def adapted(init, base=None, **more):
    """Return the adaptation of a tiny model; eva's directions are those of one row."""
    base = make() if base is None else base
    torch.manual_seed(3)
    return adapt(base, settings_of(init, **more), directions=lambda ranks: eva_directions(base, [ROW], ranks=ranks))


def run(model, optimizer, *, adaptation=None, steps=5, rate=None):
    """Take steps without a schedule or clipping; return the losses."""
    settings = OptimizerSettings(learning_rate=1.0, lr_scheduler="constant")
    outputs = train(
        model,
        [[ROW]] * steps,
        objective=SFT(),
        optimizer=optimizer,
        scheduler=schedule(optimizer, settings, num_steps=steps),
        adaptation=adaptation,
        max_grad_norm=0.0,
    )
    return [output.loss for output in outputs]


def trained(adaptation, *, steps=5, **settings):
    model = adaptation.model
    return run(model, make_optimizer(model, OptimizerSettings(**{"learning_rate": 2e-2, **settings})), adaptation=adaptation)


@pytest.mark.parametrize(("init", "adapter"), CASES)
def test_it_begins_as_the_base_and_learns(init, adapter):
    """At step 0 logits are the base's to 1e-5, and five steps lower the loss; switched off it is the base to the bit."""
    adaptation = adapted(init, adapter=adapter)
    torch.testing.assert_close(logits(adaptation.model), logits(make()), rtol=0, atol=1e-5)
    losses = trained(adaptation)
    assert losses[-1] < 0.97 * losses[0]
    with adaptation.model.disable_adapter():
        assert torch.equal(logits(adaptation.model), logits(make()))


@pytest.mark.parametrize(("init", "adapter"), CASES)
def test_plain_peft_loads_what_was_trained(init, adapter, tmp_path):
    """Plain PEFT, given the base as it was, gives the trained logits, and so does the merged model."""
    adaptation = adapted(init, adapter=adapter)
    trained(adaptation, weight_decay=0.1)
    expected = logits(adaptation.model)
    folder, _ = saved(adaptation.model, tmp_path)
    plain = PeftModel.from_pretrained(make(), folder)
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits(plain.merge_and_unload()), expected, rtol=0, atol=2e-5)


def peft_s(init, seed=3, **more):
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=6.0, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=init, **more)
    with warnings.catch_warnings():
        # PiSSA on rank-stabilised scales: PEFT says that its own conversion could not do it.
        warnings.filterwarnings("ignore", category=UserWarning)
        return get_peft_model(make(), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "adapter"),
    ci_keeps(
        [("gaussian", "lora"), ("olora", "lora"), ("pissa", "rslora"), ("mica", "lora")],
        # PEFT has no MiCA with DoRA.
        [
            (i, a)
            for i in ("gaussian", "olora", "pissa", "mica")
            for a in ("lora", "rslora", "dora")
            if (i, a) != ("mica", "dora")
        ],
    ),
)
def test_it_trains_as_pefts_own(init, adapter):
    """Losses and logits are those of PEFT's initialisation, which changes the base, under the same optimizer."""
    more = {} if adapter == "lora" else {f"use_{adapter}": True}
    theirs, ours = peft_s(init, **more), adapted(init, adapter=adapter)
    # Elements of a gradient that are rounding alone would be moved as far as any by Adam.
    adam = {"lr": 2e-2, "eps": 1e-4}
    expected = run(theirs, torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], weight_decay=0.0, **adam))
    found = trained(ours, eps=1e-4, beta2=0.999)
    assert found == pytest.approx(expected, rel=2e-5)
    torch.testing.assert_close(logits(ours.model), logits(theirs), rtol=0, atol=1e-3)


def test_the_first_values_are_pefts_on_a_conv1d():
    """GPT-2's transposed layers get the factors of their matrix, its outputs by its inputs."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=61, n_positions=32)
    base = transformers.GPT2LMHeadModel(config).eval()
    before = logits(base)
    for init in ("pissa", "olora", "mica"):
        torch.manual_seed(0)
        base = transformers.GPT2LMHeadModel(config)
        model = adapted(init, base).model
        torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
        layer = model.get_base_model().transformer.h[0].attn.c_attn
        A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        if init == "pissa":
            u, s, vh = torch.linalg.svd(layer.base_layer.weight.T)
            torch.testing.assert_close(B[:, :4] @ A[:4] * layer.scaling["default"], u[:, :4] * s[:4] @ vh[:4])


@pytest.mark.parametrize(
    ("init", "optimizer"),
    ci_keeps(
        [("pissa", "adamw"), ("pissa", "muon"), ("mica", "adamw")],
        [
            (init, optimizer)
            for init in ("pissa", "mica", "eva")
            for optimizer in ("adamw", "adafactor", "muon", "schedule_free")
        ],
    ),
)
def test_what_stays_stays_to_the_bit(init, optimizer):
    """No optimizer moves the subtracted product, MiCA's B, nor the base; decay neither."""
    adaptation = adapted(init)
    before = state(adaptation.model)
    decay = 0.0 if (init, optimizer) == ("pissa", "schedule_free") or optimizer == "adafactor" else 0.1
    more = {"lr_scheduler": "constant"} if optimizer == "schedule_free" else {}
    trained(adaptation, optimizer=optimizer, weight_decay=decay, **more)
    for name, tensor in state(adaptation.model).items():
        if ".lora_A." in name or ".lora_B." in name:
            halves = [tensor, before[name]]
            if init == "pissa":
                dim = 0 if ".lora_A." in name else 1
                halves = [each.narrow(dim, 4, 4) for each in halves]
                first = [each.narrow(dim, 0, 4) for each in (tensor, before[name])]
                assert not torch.equal(*first)
            if init == "pissa" or (init == "mica" and ".lora_B." in name):
                assert torch.equal(*halves), name
            else:
                assert not torch.equal(*halves), name
        else:
            assert torch.equal(tensor, before[name]), name


def test_a_decay_that_cannot_be_undone_is_refused():
    """Schedule-free averages hold what decayed."""
    adaptation = adapted("pissa")
    with pytest.raises(OptimizerError, match="set weight_decay=0, or optimizer=adamw"):
        trained(adaptation, optimizer="schedule_free", lr_scheduler="constant", weight_decay=0.1)


@pytest.mark.filterwarnings("ignore:lora with eva initialization used with low_cpu_mem_usage")
def test_evas_directions_are_the_principal_components():
    """Of one row they span what an SVD of the centred inputs does, and what PEFT's own EVA finds."""
    base = make().eval()
    name = "model.layers.1.mlp.down_proj"
    seen = []
    with torch.no_grad(), base.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        for ids, _ in samples([6, 9, 4, 12], learned=1.0):
            base(input_ids=torch.tensor(ids)[None])
    x = torch.cat([each[0] for each in seen])
    found = eva_directions(base, [ROW], ranks={name: 4})[name]
    torch.testing.assert_close(found @ found.T, torch.eye(4), rtol=0, atol=1e-5)
    _, _, vh = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    # PEFT's incremental PCA is a randomised one.
    torch.testing.assert_close(found.T @ found, vh[:4].T @ vh[:4], rtol=0, atol=2e-3)
    config = LoraConfig(
        r=4, target_modules=[name], task_type="CAUSAL_LM", init_lora_weights="eva", eva_config=EvaConfig(rho=1.0, tau=0.9)
    )
    theirs = get_peft_model(make(), config)
    alone = samples([31], learned=1.0)
    ids = torch.tensor(alone[0][0])[None]
    initialize_lora_eva_weights(theirs, [{"input_ids": ids}] * 2, show_progress_bar=False)
    A = theirs.get_base_model().get_submodule(name).lora_A["default"].weight.detach()
    ours = eva_directions(make(), [pack(alone)], ranks={name: 4})[name]
    torch.testing.assert_close(ours.T @ ours, A.T @ A, rtol=0, atol=1e-3)


def test_evas_rows_may_be_cut():
    """The directions of several rows span nearly what those of one long row do, and each target has its own rank."""
    base = make()
    ranks = {"model.layers.0.self_attn.q_proj": 3, "model.layers.0.self_attn.k_proj": 2, "model.layers.1.mlp.up_proj": 4}
    documents = samples([20, 30, 25, 40], learned=1.0)
    whole, cut = (eva_directions(base, rows, ranks=ranks) for rows in ([pack(documents)], [pack([each]) for each in documents]))
    for name, rank in ranks.items():
        assert whole[name].shape == (rank, 16)
        overlap = torch.linalg.svdvals(whole[name] @ cut[name].T)
        assert overlap[0] > 0.9
    with pytest.raises(AdapterError, match="no row of 4 tokens"):
        eva_directions(base, [pack(samples([3], learned=1.0))], ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("init", ci_keeps(["pissa", "mica"], ["pissa", "olora", "mica", "orthogonal"]))
def test_the_same_on_divided_weights(a_mesh, init):
    """Beside weights that ranks divide the adapters have the bits of those beside whole ones."""
    expected = adapted(init).model
    base = make()
    for layer in base.model.layers:
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), a_mesh, [Shard(0)])))
    found = state(adapted(init, base).model)
    assert all(
        torch.equal(t.full_tensor() if isinstance(t, DTensor) else t, found_t)
        for t, found_t in zip((found[name] for name in state(expected)), state(expected).values(), strict=True)
    )


@needs_bitsandbytes
@pytest.mark.slow
@pytest.mark.parametrize("quant_type", ["nf4", "int8"])
@pytest.mark.parametrize("init", ci_keeps(["pissa"], ["pissa", "olora", "mica", "orthogonal"]))
def test_beside_a_quantised_base(init, quant_type, tmp_path):
    """qlora begins as its base in 4 or 8 bits, whose bytes stay; the factors are those of the unpacked weight."""
    make().save_pretrained(tmp_path)
    plain = load(tmp_path, AdapterSettings(adapter="qlora", quant_type=quant_type))
    with torch.no_grad():
        expected = plain(input_ids=IDS).logits
    base = load(tmp_path, AdapterSettings(adapter="qlora", quant_type=quant_type))
    kept = {name: p.clone() for name, p in base.named_parameters()}
    adaptation = adapted(init, base, adapter="qlora", quant_type=quant_type)
    with torch.no_grad():
        torch.testing.assert_close(adaptation.model(input_ids=IDS).logits, expected, rtol=0, atol=2e-5)
    losses = trained(adaptation)
    assert losses[-1] < losses[0]
    after = {n.replace(".base_layer", ""): p for n, p in adaptation.model.get_base_model().named_parameters()}
    assert all(torch.equal(after[name].data, p.data) for name, p in kept.items())


def test_loraplus_is_pefts_own():
    """The losses are those of PEFT's LoRA+ optimizer: B moves at a multiple of A's rate."""
    theirs, ours = peft_s(True), adapted("default")
    made = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=8.0, eps=1e-4, betas=(0.9, 0.95))
    expected = run(theirs, made)
    found = trained(ours, learning_rate=1e-2, loraplus_lr_ratio=8.0, eps=1e-4)
    assert found == pytest.approx(expected, rel=1e-6)
    assert trained(adapted("default"), learning_rate=1e-2, eps=1e-4) != pytest.approx(expected, rel=1e-3)


def test_loraplus_of_every_optimizer():
    """Groups of B have the multiple of the rate, the log shows A's, and a schedule scales both; without LoRA it is refused."""
    model = adapted("default").model
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in ("adamw", "adafactor", "muon", "schedule_free"):
        more = {"lr_scheduler": "constant"} if optimizer == "schedule_free" else {}
        settings = OptimizerSettings(optimizer=optimizer, learning_rate=1e-3, loraplus_lr_ratio=4.0, warmup_steps=2, **more)
        made = make_optimizer(model, settings)
        of = {names[id(p)]: group for group in made.param_groups for p in group["params"]}
        assert len(of) == len([p for p in model.parameters() if p.requires_grad])
        assert {group["initial_lr"] if "initial_lr" in group else group["lr"] for group in of.values()} == {1e-3, 4e-3}
        assert all(group["lr"] == (4e-3 if ".lora_B." in name else 1e-3) for name, group in of.items())
        schedule(made, settings, num_steps=4)
        assert made.param_groups[0]["lr"] == pytest.approx(5e-4)
        assert all(group["lr"] == pytest.approx(2e-3 if ".lora_B." in name else 5e-4) for name, group in of.items())
    with pytest.raises(OptimizerError, match="loraplus_lr_ratio=4.0 has no effect"):
        make_optimizer(make(), OptimizerSettings(loraplus_lr_ratio=4.0))


@pytest.mark.parametrize("adapter", ["lora", "rslora"])
def test_lora_fa_is_pefts_own(adapter):
    """Losses are those of PEFT's LoRA-FA optimizer: A stays, B moves along the gradient nearest to the matrix's."""
    theirs, ours = peft_s(True, use_rslora=adapter == "rslora"), adapted("default", adapter=adapter, lora_fa=True)
    made = create_lorafa_optimizer(theirs, r=4, lora_alpha=6.0, lr=2e-2)
    for group in made.param_groups:
        group["betas"], group["eps"] = (0.9, 0.95), 1e-8
    expected = run(theirs, made)
    before = state(ours.model)
    # PEFT multiplies by the inverse in bfloat16.
    assert trained(ours) == pytest.approx(expected, rel=2e-3)
    assert expected[-1] < 0.97 * expected[0]
    moved = {name for name, tensor in state(ours.model).items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all(".lora_B." in name for name in moved)
    assert {name for name, p in ours.model.named_parameters() if p.requires_grad} == moved


def test_rank_and_alpha_by_layer(tmp_path):
    """The last entry that fits counts, 0 is no adapter; PEFT's own configuration gives the same layers, and loads them."""
    pattern = {"q_proj": 2, "layers.0.*": 3, "layers.0.mlp.up_proj": 0}
    adaptation = adapted("default", rank_pattern=pattern, alpha_pattern=("v_proj=12.5",))
    found = {
        name: (module.r["default"], module.lora_alpha["default"], module.scaling["default"])
        for name, module in adaptation.model.get_base_model().named_modules()
        if hasattr(module, "lora_A")
    }
    assert "model.layers.0.mlp.up_proj" not in found
    for name, (rank, alpha, scaling) in found.items():
        assert rank == (3 if ".0." in name else 2 if "q_proj" in name else 4)
        assert alpha == (12.5 if "v_proj" in name else 6.0)
        assert scaling == pytest.approx(alpha / rank)
    assert len(found) == 13
    trained(adaptation)
    folder, config = saved(adaptation.model, tmp_path)
    assert config["rank_pattern"]
    torch.testing.assert_close(logits(PeftModel.from_pretrained(make(), folder)), logits(adaptation.model), rtol=0, atol=1e-6)
    pissa = adapted("pissa", rank_pattern=pattern, alpha_pattern=("v_proj=12.5",)).model
    torch.testing.assert_close(logits(pissa), logits(make()), rtol=0, atol=1e-5)
    assert pissa.get_base_model().model.layers[1].self_attn.q_proj.r["default"] == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rank_pattern": ("qproj=2",)}, "rank_pattern 'qproj=2': qproj matches no target. Did you mean q_proj"),
        ({"alpha_pattern": ("qproj=2",)}, "alpha_pattern 'qproj=2': qproj matches no target"),
        ({"rank_pattern": ("*=0",)}, "gives every target rank 0"),
        ({"lora_r": 20, "init_lora_weights": "pissa"}, r"q_proj is \[16, 16\] and has 16 directions, and its rank is 20"),
        ({"lora_r": 20, "init_lora_weights": "eva"}, "has 16 directions"),
        ({"lora_r": 3, "init_lora_weights": "orthogonal"}, "needs an even rank"),
        ({"init_lora_weights": "eva"}, "measure them with eva_directions"),
    ],
)
def test_what_does_not_fit_is_refused(more, message):
    """One error says what and what to do."""
    with pytest.raises(AdapterError, match=message):
        adapt(make(), settings_of("default", **more))


@pytest.mark.parametrize("init", ["pissa", "olora", "mica"])
def test_weights_without_values_are_refused(init):
    """Of hsdp's stand-ins and ZeRO-3's nothing can be read."""
    for shape in ((24, 16), (0,)):
        model = make()
        model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(()).expand(shape))
        with pytest.raises(AdapterError, match=f"init_lora_weights={init} reads the base's weights.*use strategy=fsdp2"):
            adapt(model, settings_of(init))


def test_settings_that_exclude_each_other():
    """What one trains the other keeps."""
    for init in ("pissa", "mica", "olora"):
        with pytest.raises(ValueError, match="with lora_fa=True: the one trains A"):
            settings_of(init, lora_fa=True)
    with pytest.raises(ValueError, match="lora_fa=True has no effect with adapter='dora'"):
        settings_of("default", adapter="dora", lora_fa=True)
    for entry in ("q_proj", "q_proj=-1", "=3", "q_proj=0", "q_proj=nan"):
        with pytest.raises(ValueError, match="NAME=ALPHA"):
            settings_of("default", alpha_pattern=(entry,))
    assert settings_of("default", alpha_pattern={"q_proj": 1e-3}).alpha_pattern == ("q_proj=0.001",)
    with pytest.raises(ValueError, match="loftq"):
        settings_of("loftq")
