"""The loop on gloo processes under forge_dist's strategies equals one process.

Skipped where this package is installed alone: it agrees with forge_dist by shape and does not need it.
"""

import math

import numpy as np
import pytest
import torch

from forge_algos import (
    SFT,
    AdapterSettings,
    Distill,
    DistillSettings,
    DivergedError,
    OptimizerSettings,
    SupervisedSettings,
    UnevenRanksError,
    adapt,
    evaluate,
    make_optimizer,
    schedule,
    train,
)

from ...lanes import ci_keeps
from ...ranks import run_on_ranks
from ..oracle import CPU, make, pack, samples

pytest.importorskip("forge_dist", reason="forge_dist is not installed beside forge_algos")

pytestmark = [pytest.mark.slow, pytest.mark.together]

LENGTHS = (5, 9, 2, 7, 13, 4, 6)
LORA = AdapterSettings(adapter="lora", lora_r=3)
# Adam's eps at 1e-3: a gradient of 1e-7 divided by its own root would turn rounding into a step.
OPTIMIZER = OptimizerSettings(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5)


def steps_of(rank, world_size):
    """Return six steps of two micro-batches, some ranks without work.
    In step 2 the last rank has nothing, in step 4 no rank, in step 5 the second column is empty.
    """
    found = []
    for number in range(1, 7):
        step = samples(LENGTHS, seed=number, learned=0.0 if number == 4 else 0.6)
        sharing = world_size - (number == 2 and world_size > 1)
        mine = step[rank::sharing] if rank < sharing else []
        cut = [mine, []] if number == 5 else [mine[:1], mine[1:]]
        found.append([pack(part) for part in cut])
    return found


def run(strategy, folder, adapter, rank, world_size, *, wrong=None, on_nan="stop", objective=None, config=OPTIMIZER):
    """Return (outputs, evaluations, head, last gradients, weights) under a strategy, or none."""
    if strategy is None:
        model = load(folder)
        kind = {}
    else:
        model = strategy.load(folder, dtype=torch.float32, attention="sdpa")
        kind = {"parallel": strategy}
    if adapter:
        torch.manual_seed(5)
        if strategy is not None:
            strategy.settle(model)
        model = adapt(model, LORA).model
    if strategy is None:
        optimizer = make_optimizer(model, config)
    else:
        model, optimizer = strategy.wrap(model, lambda module: make_optimizer(module, config))
    if wrong is not None and rank == wrong:
        calls = iter([False] * 4 + [True] + [False] * 20)
        bend = lambda _m, _a, out: out * float("nan") if torch.is_grad_enabled() and next(calls) else None  # noqa: E731
        next(m for m in model.modules() if isinstance(m, torch.nn.Embedding)).register_forward_hook(bend)
    held_out = [pack(part) for part in (samples((6, 3), seed=99)[rank::world_size], samples((8,), seed=98)[rank::world_size])]
    common = {"objective": objective or SFT(), "device": CPU, **kind}
    before = evaluate(model, held_out, **common)
    torch.manual_seed(rank)
    outputs = list(
        train(
            model,
            steps_of(rank, world_size),
            optimizer=optimizer,
            scheduler=schedule(optimizer, config, 6),
            max_grad_norm=config.max_grad_norm,
            on_nan=on_nan,
            first_step=3,
            **common,
        )
    )
    # Before another forward: FSDP would put its whole weights, which have no gradients, into their places.
    trained = {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: whole(p.grad) for name, p in trained.items()}
    weights = {name: whole(p.detach()) for name, p in trained.items()}
    after = evaluate(model, held_out, **common)
    return outputs, before, after, SFT().bind(model, device=CPU).head.name, grads, weights


def whole(tensor):
    """Return all of a tensor, as numpy, which travels between processes."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).numpy()


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()


def on_rank(ranks, cases):
    """Return every case → result of `run`, or the error.
    A case is (strategy, its options, model, adapter, on_nan, the rank that diverges).
    """
    import forge_dist

    found = []
    for name, options, folder, adapter, on_nan, wrong in cases:
        settings = forge_dist.StrategySettings(strategy=name, **options)
        strategy = forge_dist.make_strategy(settings, ranks, device=CPU, adapter=adapter)
        try:
            found.append(run(strategy, folder, adapter, ranks.rank, ranks.world_size, wrong=wrong, on_nan=on_nan))
        except DivergedError as error:
            found.append(str(error))
    # Unequal numbers of micro-batches: refused on all ranks, and the ranks can still talk afterwards.
    with pytest.raises(UnevenRanksError, match="equally many"):
        evaluate(make(), [pack(samples((4,)))] * (1 + ranks.is_first), objective=SFT(), parallel=strategy)
    return found, ranks.sum([1.0])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for architecture in ("llama-tied", "llama-untied"):
        directory = tmp_path_factory.mktemp(architecture)
        make(architecture).save_pretrained(directory)
        found[architecture] = str(directory)
    return found


def same(ours, theirs, world_size):
    """Check outputs, evaluations and choice of head of a rank against those of one process."""
    outputs, before, after, head, grads, weights = ours
    expected, expected_before, expected_after, expected_head, expected_grads, expected_weights = theirs
    assert head == expected_head == "chunked"
    assert [o.step for o in outputs] == [3, 4, 5, 6, 7, 8]
    for output, other in zip(outputs, expected, strict=True):
        for fact in ("loss_count", "tokens", "samples", "learning_rate", "skipped"):
            assert getattr(output, fact) == getattr(other, fact)
        assert output.loss == pytest.approx(other.loss, rel=1e-5)
        assert output.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        assert output.figures == pytest.approx(other.figures, rel=1e-5)
    for found, other in ((before, expected_before), (after, expected_after)):
        assert found.loss_count == other.loss_count
        assert found.loss == pytest.approx(other.loss, rel=1e-5)
        assert found.figures == pytest.approx(other.figures, rel=1e-5)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        # Of the last step, behind five moves of the optimizer, clipped.
        np.testing.assert_allclose(grads[name], grad, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(weights[name], expected_weights[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("world_size", ci_keeps([2], [2, 4]))
def test_real_ranks_equal_one_process(folders, world_size):
    """Under ddp, fsdp2 and hsdp results are one process's; full and LoRA, tied and untied heads.
    Unequal counts, idle ranks, accumulation, clipping, decay, evaluation.
    """
    tied, untied = folders["llama-tied"], folders["llama-untied"]
    cases = [
        ("fsdp2", {}, tied, False, "stop", None),
        ("fsdp2", {}, untied, False, "stop", None),
        ("fsdp2", {}, tied, True, "stop", None),
        ("ddp", {}, tied, False, "stop", None),
        ("ddp", {}, tied, True, "stop", None),
        ("fsdp2", {}, tied, False, "stop", 1),
        ("fsdp2", {}, tied, False, "skip", 1),
        ("ddp", {}, tied, False, "stop", 1),
    ]
    if world_size == 4:
        cases = [
            ("hsdp", {"shard_size": 2}, untied, False, "stop", None),
            ("hsdp", {"shard_size": 2}, tied, True, "stop", None),
        ]
    expected = {}
    for _, _, folder, adapter, _, wrong in cases:
        if wrong is None and (folder, adapter) not in expected:
            expected[folder, adapter] = run(None, folder, adapter, 0, 1)
    results = run_on_ranks(on_rank, world_size, cases)
    for found, total in results:
        assert total == [world_size]
        for (_, _, folder, adapter, on_nan, wrong), ours, first in zip(cases, found, results[0][0], strict=True):
            if wrong is None:
                same(ours, expected[folder, adapter], world_size)
                assert [o.loss for o in ours[0]] == [o.loss for o in first[0]]
            elif on_nan == "stop":
                # The second rank's fifth pass is the first micro-batch of the loop's third step.
                assert ours == first
                assert ours.startswith("step 5: the loss is nan. The optimizer did not move")
            else:
                assert [o.skipped for o in ours[0]] == [False, False, True, False, False, False]
                assert all(math.isfinite(o.loss) for o in ours[0] if not o.skipped)
                assert ours[2] == first[2]


NOISY = SFT(SupervisedSettings(neftune_alpha=5.0, z_loss=1e-3, label_smoothing=0.1, normalize="trl"))
OPTIMIZERS = ("muon", "schedule_free", "apollo", "apollo_mini")


def noisy_on_rank(ranks, folder):
    """Return the noisy objective under ddp, fsdp2 and an adapter, optimizers and a teacher.
    The last two under fsdp2.
    """
    import forge_dist

    def go(name, adapter, objective, config):
        strategy = forge_dist.make_strategy(forge_dist.StrategySettings(strategy=name), ranks, device=CPU, adapter=adapter)
        return run(strategy, folder, adapter, ranks.rank, ranks.world_size, objective=objective, config=config)

    noisy = {(name, adapter): go(name, adapter, NOISY, OPTIMIZER) for name in ("ddp", "fsdp2") for adapter in (False, True)}
    moved = {name: go("fsdp2", False, SFT(), optimizer_of(name)) for name in OPTIMIZERS}
    strategy = forge_dist.make_strategy(forge_dist.StrategySettings(strategy="fsdp2"), ranks, device=CPU, adapter=False)
    teachers = {"whole": load(folder), "sharded": strategy.load(folder, dtype=torch.float32, attention="sdpa")}
    taught = {name: go("fsdp2", False, distilled(teacher), OPTIMIZER) for name, teacher in teachers.items()}
    return noisy, moved, taught


def distilled(teacher):
    """Return an objective whose teacher differs from the student, from the same files."""
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    return Distill(settings=DistillSettings(teacher_path="loaded"), teacher=teacher)


def optimizer_of(name):
    shape = {"lr_scheduler": "constant"} if name == "schedule_free" else {}
    return OptimizerSettings(
        optimizer=name, learning_rate=1e-2, eps=1e-3, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5, **shape
    )


def test_noise_measured_means_optimizers_and_teachers_on_real_ranks(folders):
    """NEFTune, measured totals, optimizers and teachers give the same, divided or not.
    Muon, schedule-free and APOLLO move shards as they move whole tensors; a student may be divided, and its teacher too or not.
    """
    pytest.importorskip("schedulefree", reason="schedulefree is an optional package")
    folder = folders["llama-untied"]
    results = run_on_ranks(noisy_on_rank, 2, folder)
    expected = {name: run(None, folder, False, 0, 1, config=optimizer_of(name)) for name in OPTIMIZERS}
    expected_taught = run(None, folder, False, 0, 1, objective=distilled(load(folder)))
    for noisy, moved, taught in results:
        for found in taught.values():
            same(found, expected_taught, 2)
            assert found[0][0].figures["kl"] > 0.1
        for adapter in (False, True):
            same(noisy["fsdp2", adapter], noisy["ddp", adapter], 2)
            assert noisy["ddp", adapter][0][0].figures.keys() == {"accuracy", "nll"}
        for name in OPTIMIZERS:
            # Muon iterates in bfloat16, whose sums over shards have another order; steps of shards alone would be 2e-3 off.
            loss, weight, which = (3e-4, 1e-3, "proj") if name == "muon" else (1e-5, 1e-5, "")
            for output, other in zip(moved[name][0], expected[name][0], strict=True):
                assert output.loss == pytest.approx(other.loss, rel=loss)
            for parameter, value in expected[name][5].items():
                if which in parameter:
                    np.testing.assert_allclose(moved[name][5][parameter], value, rtol=1e-4, atol=weight, err_msg=parameter)
