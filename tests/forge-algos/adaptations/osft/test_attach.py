"""OSFT models under every rule and form: what trains, what stays, and the plain model."""

import copy
from itertools import product

import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from forge_algos import SFT, AdapterError, AdapterSettings, OptimizerError, adapt, make_optimizer, schedule, train
from forge_algos.adaptations import osft_importance
from forge_algos.adaptations.osft._delta import Delta

from ....lanes import ci_keeps
from ...oracle import distance, gradients, make, naive, pack, samples
from ...osft import LENGTHS, RULES, STRICT, leaks, learns, moved, osft, run, settings_of, steps, trained, values
from ...preferences import a_classifier
from ...threads import on_threads

IDS = torch.arange(3, 22)[None]
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of matrices 16 to 16, 16 to 8, 16 to 24 and 24 to 16: square, wide and tall."""


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ratio", [0.0625, 0.25, 0.9])
def test_the_initial_model_is_the_base(rule, ratio):
    """Logits before training are the base's to the bit; within rounding for `factors`.
    `factors` adds the difference of the factors from themselves, which is rounded.
    """
    before = logits(make())
    after = logits(osft(unfreeze_rank_ratio=ratio, **RULES[rule]).model)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 if rule == "factors" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ci_keeps(["direct"], RULES))
def test_protected_directions_stay_through_100_steps_and_a_resume(rule):
    """100 steps of AdamW with weight decay and clipping keep the rule, and resume to the bit.
    The change under the strict rule has no part on either protected side, under the paper's none from one to the other. A run
    whose trained parameters and optimizer state were saved and loaded after 50 steps ends in the same bits.
    """
    data, before = steps(100), values(make())
    whole = osft(**RULES[rule])
    outputs = run(whole, data)
    assert learns(outputs)
    left, right, both = leaks(whole, before)
    assert both < 1e-5
    if rule == "paper":
        assert min(left, right) > 1e-2
    else:
        assert max(left, right) < 1e-5

    config = settings_of(lr_scheduler="constant")
    halves = [osft(**RULES[rule]) for _ in range(3)]
    optimizers = [make_optimizer(half.model, config) for half in halves]
    run(halves[0], data, config, optimizer=optimizers[0])
    run(halves[1], data[:50], config, optimizer=optimizers[1])
    state = {name: p.detach().clone() for name, p in halves[1].model.named_parameters() if p.requires_grad}
    missing = halves[2].model.load_state_dict(copy.deepcopy(state), strict=False)
    assert not missing.unexpected_keys
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    run(halves[2], data[50:], config, optimizer=optimizers[2])
    ends = [half.model.state_dict() for half in (halves[0], halves[2])]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert halves[0].identity == halves[2].identity


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_protected_directions_stay_at_a_low_rate(rule):
    """Where 100 steps change almost nothing, rounding of the weights does not break the rule."""
    before = values(make())
    adaptation = osft(**RULES[rule])
    run(adaptation, steps(100), settings_of(learning_rate=2e-5))
    left, right, both = leaks(adaptation, before)
    assert (both if rule == "paper" else max(left, right)) < 1e-5


@pytest.mark.parametrize("rule", ["factors", "paper"])
def test_train_needs_the_adaptation_of_a_rule_around_steps(rule):
    """`train` refuses a model whose rule acts around steps when `adaptation=` is missing.
    Training would leave the subspace silently.
    """
    model = osft(**RULES[rule]).model
    config = settings_of()
    optimizer = make_optimizer(model, config)
    with pytest.raises(AdapterError, match="adaptation=.*what `adapt` returned"):
        next(train(model, steps(1), objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, config, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_plain_model_is_saved_in_one_line(rule, tmp_path):
    """`save_pretrained` of `plain_state` loads as the plain class with the trained logits."""
    adaptation = osft(**RULES[rule])
    run(adaptation, steps(3))
    adaptation.model.save_pretrained(tmp_path, state_dict=adaptation.plain_state())
    again, report = type(adaptation.model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    torch.testing.assert_close(logits(again), logits(adaptation.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", STRICT)
def test_the_base_is_bit_identical_after_training(rule):
    """Under the strict rule no tensor of the model itself changes."""
    before = values(make())
    adaptation = osft(**STRICT[rule])
    run(adaptation, steps(5))
    after = values(adaptation.model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    added = {name for name in after if name not in before}
    assert added
    assert all(any(name.startswith(f"{home}.") for home in adaptation.additions) for name in added)
    assert trained(adaptation.model) == added


@pytest.mark.parametrize("rule", RULES)
def test_plain_gives_a_plain_models_state(rule):
    """`plain` of each tensor gives a state of the base's names and dtypes, which loads.
    The plain class has the logits of the model in training.
    """
    adaptation = osft(**RULES[rule])
    run(adaptation, steps(20))
    additions = tuple(f"{home}." for home in adaptation.additions)
    state = adaptation.model.state_dict()
    plain = {name: adaptation.plain(name, value) for name, value in state.items() if not name.startswith(additions)}
    model = make(seed=5)
    assert {n: t.dtype for n, t in plain.items()} == {n: t.dtype for n, t in model.state_dict().items()}
    model.load_state_dict(plain)
    torch.testing.assert_close(logits(model), logits(adaptation.model), rtol=0, atol=1e-4)
    assert (logits(model) - logits(make())).abs().max() > 0.1
    # What has not moved is handed through, not copied: an export would hold the model twice.
    assert plain["model.norm.weight"] is state["model.norm.weight"]


def test_plain_adds_in_float32_and_answers_in_the_tensors_dtype():
    """A bfloat16 weight comes out as the bfloat16 nearest to the sum."""
    adaptation = osft()
    run(adaptation, steps(3))
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = adaptation.model.state_dict()[name]
    narrow = adaptation.plain(name, weight.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, (weight.bfloat16().float() + adaptation.plain(name, weight) - weight).bfloat16())


@pytest.mark.parametrize("rule", RULES)
def test_ratio_one_is_full_fine_tuning_of_the_targets(rule):
    """Ratio 1 equals full fine-tuning with the same optimizer, to the bit."""
    ours = osft(unfreeze_rank_ratio=1.0, target_modules=("mlp", "q_proj"), **RULES[rule])
    assert not ours.additions
    theirs = adapt(make(), AdapterSettings())
    for name, parameter in theirs.model.named_parameters():
        parameter.requires_grad = ".mlp." in name or "q_proj" in name
    outputs = [run(adaptation, steps(5)) for adaptation in (ours, theirs)]
    assert [o.loss for o in outputs[0]] == [o.loss for o in outputs[1]]
    ends = [adaptation.model.state_dict() for adaptation in (ours, theirs)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("rule", RULES)
def test_ratio_zero_moves_no_target(rule):
    """At ratio 0 targets stay to the bit beside trained norms; nothing to train is refused."""
    before = values(make())
    adaptation = osft(unfreeze_rank_ratio=0.0, osft_train_rest=("norms",), **RULES[rule])
    assert not adaptation.additions
    run(adaptation, steps(3))
    after = values(adaptation.model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained(adaptation.model)
    assert all("norm" in name for name in trained(adaptation.model))
    with pytest.raises(AdapterError, match="nothing would train; raise the ratio"):
        osft(unfreeze_rank_ratio=0.0, **RULES[rule])


def test_each_target_has_its_own_share():
    """`rank_pattern` mixes none, some and all; `plan` and the log have each number."""
    adaptation = osft(rank_pattern=("q_proj=0", "layers.0.*up_proj=16", "down_proj=3"))
    free = {name.removeprefix("model.layers."): entry["free"] for name, entry in adaptation.plan.items()}
    assert (free["0.self_attn.q_proj"], free["1.self_attn.k_proj"]) == (0, 2)
    assert (free["0.mlp.up_proj"], free["1.mlp.up_proj"], free["0.mlp.down_proj"]) == (16, 4, 3)
    names = trained(adaptation.model)
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert not any("q_proj" in name for name in names)
    entry = adaptation.plan["model.layers.0.mlp.down_proj"]
    assert (entry["shape"], entry["protected"]) == ([16, 24], 13)
    assert 0 < entry["error"] < 1e-6
    assert "14 targets" in adaptation.describe()[0]
    assert "3 of 16 (2)" in adaptation.describe()[0]


def test_identity_is_of_the_singular_vectors_and_the_shares():
    """`identity` follows from the model and the shares; another of either gives another."""
    same = {osft().identity for _ in range(2)}
    others = {osft(make(seed=1)).identity, osft(unfreeze_rank_ratio=0.5).identity}
    assert len(same) == 1
    assert len(same | others) == 3


def test_free_replaces_the_settings_ranks():
    """`free` replaces what the settings would give; one that does not fit is refused by target."""
    settings = AdapterSettings(adapter="osft", osft_rank="adaptive")
    begun = adapt(make(), settings, importance=lambda names: {name: float("q_proj" in name) * 7 for name in names})
    free = {name: entry["free"] for name, entry in begun.plan.items()}
    assert len(set(free.values())) > 1
    assert adapt(make(), settings, free=free).plan == begun.plan
    name = "model.layers.1.mlp.down_proj"
    with pytest.raises(AdapterError, match=f"{name} has 16 directions, and 17 of them"):
        adapt(make(), settings, free={**free, name: 17})
    with pytest.raises(AdapterError, match=f"{name} has 16 directions, and None of them"):
        adapt(make(), settings, free={other: r for other, r in free.items() if other != name})
    with pytest.raises(AdapterError, match="give `importance`"):
        adapt(make(), settings)


@pytest.mark.parametrize(
    ("architecture", "kind", "expected"),
    [
        ("llama-tied", "embeddings", {"model.embed_tokens.weight"}),
        ("llama-tied", "head", {"model.embed_tokens.weight"}),
        ("llama-untied", "head", {"lm_head.weight"}),
        ("llama-tied", "norms", set()),
    ],
)
def test_the_rest_trains_where_it_is_asked_for(architecture, kind, expected):
    """`osft_train_rest` trains beside the targets and is logged; a tied head is the embeddings."""
    adaptation = osft(make(architecture), osft_train_rest=(kind,))
    rest = {name for name in trained(adaptation.model) if ".osft." not in name}
    if kind == "norms":
        assert len(rest) == 5
        expected = {name for name in rest if "norm" in name}
    assert rest == expected
    line = adaptation.describe()[1]
    assert kind in line.split("frozen")[0]
    assert kind not in line.split("frozen")[1]
    assert ("one weight" in line) == (architecture == "llama-tied" and kind != "norms")
    assert ("embeddings" in line.split("frozen")[1]) == ("model.embed_tokens.weight" not in rest)


@pytest.mark.parametrize("architecture", ["llama-tied", "llama-untied"])
def test_all_of_the_rest_is_what_the_model_has(architecture):
    """Every kind that there is, and no complaint about one that there is not."""
    made = [osft(make(architecture), osft_train_rest=rest) for rest in (("all",), ("norms", "head", "embeddings"))]
    assert trained(made[0].model) == trained(made[1].model)


def test_by_default_the_rest_is_frozen():
    """By default embeddings, head, norms and biases are frozen, unlike mini-trainer's."""
    adaptation = osft()
    assert all(".osft." in name for name in trained(adaptation.model))
    assert (
        "trains: nothing; frozen: the targets' protected directions, embeddings, head, norms, biases"
        in adaptation.describe()[1]
    )
    with pytest.raises(AdapterError, match="osft_train_rest=biases: LlamaForCausalLM has none. It has embeddings, head, norms"):
        osft(osft_train_rest=("biases",))


def test_a_reward_models_score_trains_whole():
    """A reward model's `score` trains: it is new, and useless while frozen."""
    adaptation = osft(a_classifier())
    assert {name for name in trained(adaptation.model) if ".osft." not in name} == {"score.weight"}
    assert "score" in adaptation.describe()[1].split("frozen")[0]


def shared_block():
    """Return a Llama both of whose layers project queries and values by one weight, as Zamba's shared block does."""
    model = make("llama-untied")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    second.v_proj = first.v_proj
    return model


@pytest.mark.parametrize("settings", [{}, {"osft_form": "factors"}, {"osft_rule": "paper"}], ids=str)
def test_layers_that_share_a_weight_move_together(settings):
    """They are one target: both compute with the same W + ΔW, which is what an export has, and its gradient is of both."""
    model, plain = shared_block(), shared_block()
    adaptation = osft(model, **settings)
    assert len(adaptation.plan) == 2 * 7 - 2
    ids = torch.arange(3, 14)[None]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        adaptation.before_step()
        optimizer.step()
        adaptation.after_step()
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(adaptation.plain(name, model.get_parameter(name)))
        assert not torch.equal(plain.model.layers[1].self_attn.q_proj.weight, shared_block().get_parameter(Q))
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    own = tuple(f"{name}." for name in adaptation.additions)
    assert {name for name in model.state_dict() if not name.startswith(own)} == set(plain.state_dict())


def test_a_layer_that_shares_its_weight_is_no_target_alone():
    """The others that have the weight would not move with it."""
    with pytest.raises(AdapterError, match="q_proj.weight are one weight.*or name the layers of all of them"):
        osft(shared_block(), target_modules=("layers.0.self_attn.q_proj",))
    assert len(osft(shared_block(), target_modules=("layers.0.self_attn.v_proj",)).plan) == 1


Q = "model.layers.0.self_attn.q_proj.weight"


def test_unsupported_models_are_refused_by_name():
    """A tied head, embeddings and a model under OSFT are refused by name."""
    with pytest.raises(AdapterError, match="embed_tokens.weight and lm_head.weight are one weight.*leave lm_head out"):
        osft(make(), target_modules=("lm_head", "q_proj"))
    untied = osft(make("llama-untied"), target_modules=("lm_head",))
    assert untied.additions == ["lm_head.osft"]
    with pytest.raises(AdapterError, match="under OSFT already"):
        osft(untied.model)


def gpt2(*, linear):
    """Return a GPT-2, whose Conv1D layers hold transposed weights, or the same with linear layers in their place."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=61,
        n_positions=64,
        initializer_range=0.3,
        attn_pdrop=0,
        resid_pdrop=0,
        embd_pdrop=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    for name, module in list(model.named_modules()):
        if linear and isinstance(module, Conv1D):
            layer = torch.nn.Linear(module.nx, module.nf)
            layer.weight.data, layer.bias.data = module.weight.data.t().contiguous(), module.bias.data
            model.set_submodule(name, layer)
    return model


@pytest.mark.parametrize("rank", ["uniform", "adaptive"])
@pytest.mark.parametrize("rule", RULES)
def test_transposed_layers_train_as_linear_ones(rule, rank):
    """A Conv1D's weight changes as a linear layer's does, transposed; switched off it is the base."""
    found, data = {}, steps(10)
    for linear in (False, True):
        model = gpt2(linear=linear)
        first = logits(model)
        batches = [batch for step in data[:2] for batch in step]
        adaptation = adapt(
            model,
            AdapterSettings(adapter="osft", osft_rank=rank, unfreeze_rank_ratio=0.25, **RULES[rule]),
            importance=lambda names, model=model, batches=batches: osft_importance(model, batches, targets=names),
        )
        before = values(adaptation.model)
        outputs = run(adaptation, data)
        assert learns(outputs)
        changes = moved(adaptation, before)
        found[linear] = [output.loss for output in outputs], changes, {name: e["free"] for name, e in adaptation.plan.items()}
        if rank == "uniform":
            assert leaks(adaptation, before)[2] < 1e-5
        if rule != "paper":
            assert not torch.allclose(logits(adaptation.model), first, atol=1e-2)
            for module in adaptation.model.modules():
                if isinstance(module, Delta):
                    module.off = True
            torch.testing.assert_close(logits(adaptation.model), first, rtol=0, atol=0)
    assert found[False][2] == found[True][2]
    assert found[False][0] == pytest.approx(found[True][0], rel=1e-4)
    for name, change in found[False][1].items():
        expected = found[True][1][name].mT
        assert float((change - expected).norm()) <= 1e-2 * float(expected.norm()), name


def test_an_untied_head_can_be_a_target():
    """The loss is computed by the head with its ΔW, not from its weight alone."""
    adaptation = osft(make("llama-untied"), target_modules=("lm_head",))
    outputs = run(adaptation, steps(30))
    before, after = outputs[0].loss, run(adaptation, steps(1), settings_of(learning_rate=1e-9))[0].loss
    assert after < before - 0.01
    with torch.no_grad():
        total, count = naive(adaptation.model, samples(LENGTHS, seed=0))
    assert after == pytest.approx(float(total) / count, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cuts", [(3, 1), (1, 2)], ids=["accumulated", "two ranks"])
def test_numbers_do_not_depend_on_how_a_step_is_cut(rule, cuts):
    """Three micro-batches, or two ranks, give the same losses and weights within rounding."""
    micro_batches, world_size = cuts
    whole = osft(**RULES[rule])
    config = settings_of(optimizer="adamw", eps=1e-3)
    expected = run(whole, steps(4), config)

    def work(rank):
        adaptation = osft(**RULES[rule])
        rank.parameters = list(adaptation.model.parameters())
        data = [[batch] for step in steps(4, micro_batches=2) for batch in step[rank.rank :: 2]]
        return run(adaptation, data, config, parallel=rank), adaptation

    if world_size == 1:
        cut = osft(**RULES[rule])
        found = [(run(cut, steps(4, micro_batches=micro_batches), config), cut)]
    else:
        found = on_threads(work, world_size)
    for outputs, adaptation in found:
        assert [o.loss for o in outputs] == pytest.approx([o.loss for o in expected], rel=1e-5)
        ours, theirs = (
            {n: p.detach() for n, p in a.model.named_parameters() if n in trained(whole.model)} for a in (adaptation, whole)
        )
        assert distance(ours, theirs) < 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_activation_checkpointing_changes_no_gradient(rule):
    """What is computed again in the backward pass gives the same gradients."""
    found = []
    for checkpointing in (False, True):
        adaptation = osft(**RULES[rule])
        run(adaptation, steps(2))
        adaptation.model.zero_grad()
        if checkpointing:
            adaptation.model.activation_checkpointing_enable({"use_reentrant": False})
        total, _ = naive(adaptation.model, samples(LENGTHS))
        total.backward()
        found.append(gradients(adaptation.model))
    assert found[0]
    assert distance(found[1], found[0]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_autocast_is_near_float32(rule):
    """The forward casts as linear layers do; trained parameters and their gradients stay float32."""
    found = []
    for autocast in (False, True):
        adaptation = osft(**RULES[rule])
        run(adaptation, steps(5))
        adaptation.model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            total, _ = naive(adaptation.model, samples(LENGTHS))
        total.backward()
        found.append(gradients(adaptation.model))
    assert {gradient.dtype for gradient in found[1].values()} == {torch.float32}
    assert distance(found[1], found[0]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "optimizer"),
    ci_keeps(
        [("direct", "muon"), ("factors", "adafactor"), ("paper", "schedule_free")],
        list(product(RULES, ("adafactor", "muon", "schedule_free"))),
    ),
)
def test_other_optimizers_keep_the_rule(rule, optimizer):
    """The direct form keeps its rule under any optimizer.
    The projected ones under all but schedule_free, whose result is an average that is never projected.
    """
    if optimizer == "schedule_free":
        pytest.importorskip("schedulefree")
    scale = {"learning_rate": 1e-1} if optimizer == "adafactor" else {}
    constant = {"lr_scheduler": "constant"} if optimizer == "schedule_free" else {}
    before, adaptation = values(make()), osft(**RULES[rule])
    config = settings_of(optimizer=optimizer, **scale, **constant)
    if optimizer == "schedule_free" and rule != "direct":
        with pytest.raises(
            OptimizerError, match="gives averages.*take optimizer=adamw, or osft_rule=strict with osft_form=direct"
        ):
            run(adaptation, steps(1), config)
        return
    outputs = run(adaptation, steps(30), config)
    assert learns(outputs)
    left, right, both = leaks(adaptation, before)
    assert both < 1e-5
    assert rule == "paper" or max(left, right) < 1e-5


def test_a_skipped_step_moves_nothing():
    """A step without learned tokens leaves weights under the paper's rule to the bit."""
    adaptation = osft(osft_rule="paper")
    run(adaptation, steps(2))
    before = values(adaptation.model)
    empty = pack([(ids, torch.full((len(ids),), -100).numpy()) for ids, _ in samples(LENGTHS)])
    run(adaptation, [[empty]])
    assert all(torch.equal(value, before[name]) for name, value in values(adaptation.model).items())


def test_a_deep_copy_is_independent():
    """A deep copy computes with its own ΔW; changing it does not change the first model."""
    first = osft().model
    second = copy.deepcopy(first)
    before = logits(first)
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            if ".osft." in name:
                parameter.normal_()
    assert torch.equal(logits(first), before)
    assert (logits(second) - before).abs().max() > 0.1
