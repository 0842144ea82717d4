"""DeepSpeed's ZeRO behind the protocol, against one process with torch's own AdamW."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge_dist import CheckpointError, StrategyError, StrategySettings, make_strategy
from forge_dist.strategies.zero._state import MODEL, OPTIMIZER

from ....lanes import ci_keeps
from ....ranks import run_on_ranks

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'forge-dist[deepspeed]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install 'forge-dist[deepspeed]'")

pytestmark = pytest.mark.together

# Steps of micro-batches of three samples, by length; 0 is a sample with nothing to learn, at which a rank runs idle.
STEPS = [[[5, 9, 4], [3, 11, 0]], [[7, 0, 5], [4, 6, 2]], [[2, 13, 3]], [[8, 3, 0], [5, 5, 7], [0, 9, 0]]]
MAX_NORM = 0.5
# Stage 3 divides what stages 1 and 2 divide, and the weights too.
by_stage = pytest.mark.parametrize("stage", ci_keeps([3], [1, 2, 3]))


def adamw(model):
    """Two groups, as the real one: matrices decay. The number of dimensions has to be that of the whole parameter."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    # Divided by 1e-8 beside its own root, a gradient of 1e-7 would turn the last bit of a sum into the fifth digit of a weight.
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


def sample(step, micro, rank, length):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(61, (1, length), generator=generator)


def nll(model, ids):
    """Summed loss; of no sample exactly zero, with every parameter taking part."""
    idle = not ids.numel()
    logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long) if idle else ids, use_cache=False).logits
    if idle:
        return logits.sum() * 0.0
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")


def count(step):
    return sum(max(0, length - 1) for micro in step for length in micro)


def add_lora(model):
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=True)


def alone(path, *, lora=False, dtype=torch.float32):
    """Losses, norms, gradients of each step and final weights of one process."""
    from forge_dist import load_model

    model = load_model(path, dtype=dtype, device="cpu")
    model = add_lora(model) if lora else model
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    out = []
    for k, step in enumerate(STEPS):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for m, micro in enumerate(step):
            for rank, length in enumerate(micro):
                loss = nll(model, sample(k, m, rank, length)) / count(step)
                loss.backward()
                total += loss.item()
        trained = [p for p in model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
        optimizer.step()
        schedule.step()
        out.append((total, norm.item()))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = {name: optimizer.state[p] for name, p in model.named_parameters() if p.requires_grad}
    return out, weights, states


class Run:
    """One strategy's model and optimizer, stepped through STEPS."""

    def __init__(self, ranks, path, stage, *, lora=False, frozen=(), dtype=torch.float32, **options):
        settings = StrategySettings(strategy=f"zero{stage}" if isinstance(stage, int) else stage, **options)
        self.ranks = ranks
        self.strategy = make_strategy(settings, ranks, device=torch.device("cpu"), adapter=lora)
        model = self.strategy.load(path, dtype=dtype)
        model = add_lora(model) if lora else model
        for name in frozen:
            model.get_parameter(name).requires_grad_(requires_grad=False)
        self.model, self.optimizer = self.strategy.wrap(model, adamw)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 1 / (1 + k))

    def gradients(self, k, factor=1.0):
        """Forward and backward of a step; (loss, norm) over all ranks."""
        step, world, rank, total = STEPS[k], self.ranks.world_size, self.ranks.rank, 0.0
        self.strategy.zero_grad(self.optimizer)
        # Every `world`th sample of a micro-batch is this rank's; a rank that has fewer than another runs idle.
        mine = [(m, i) for m in range(len(step)) for i in range(rank, 3 + (-3) % world, world)]
        for turn, (m, i) in enumerate(mine):
            with self.strategy.micro_batch(turn == len(mine) - 1):
                length = step[m][i] if i < 3 else 0
                loss = nll(self.model, sample(k, m, i, length)) / count(step) * factor
                self.strategy.backward(loss)
            total += loss.item()
        norm = self.strategy.grad_norm(self.parameters())
        assert (norm.dtype, norm.shape) == (torch.float32, ())
        return self.strategy.sum([total])[0], norm.item()

    def parameters(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self, k):
        loss, norm = self.gradients(k)
        if norm > MAX_NORM:
            self.strategy.scale_grads(self.parameters(), MAX_NORM / (norm + 1e-6))
        self.strategy.step(self.optimizer)
        self.schedule.step()
        return loss, norm

    def whole(self):
        return dict(self.strategy.whole(self.model))

    def state(self):
        return self.strategy.state(self.model, self.optimizer)


class Saved:
    """A checkpoint in memory: whole tensors by name."""

    def __init__(self, tensors):
        self.whole = tensors
        self.tensors = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}

    def read(self, into):
        assert into.keys() <= self.whole.keys()
        for name, value in into.items():
            whole = self.whole[name]
            if hasattr(value, "to_local"):
                pieces = whole.chunk(value.device_mesh.size())
                rank = value.device_mesh.get_rank()
                mine = pieces[rank] if rank < len(pieces) else whole[:0]
                value.to_local().copy_(mine)
            else:
                value.copy_(whole)


def together(state):
    return {name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone() for name, value in state.items()}


def trained_like_alone(ranks, path, stages, options):
    """Stage → losses, norms, final weights and optimizer state, as plain values from rank 0, and the bytes that each rank
    keeps.
    """
    found = {}
    for stage in stages:
        run = Run(ranks, path, stage, **options)
        steps = [run.step(k) for k in range(len(STEPS))]
        state = run.state()
        kept = sum(v.to_local().nbytes for v in state.values() if hasattr(v, "to_local"))
        found[stage] = (steps, run.whole(), together(state), kept, run.strategy.name)
    return found


def check(expected, found, losses=1e-6, norms=1e-5, tolerance=1e-5):
    steps, weights, states = expected
    for stage, (got, whole, state, _, name) in found.items():
        assert name == f"zero{stage}"
        for (loss, norm), (loss0, norm0) in zip(got, steps, strict=True):
            assert loss == pytest.approx(loss0, rel=losses)
            assert norm == pytest.approx(norm0, rel=norms)
        for fqn, weight in weights.items():
            torch.testing.assert_close(whole[fqn], weight, rtol=tolerance, atol=tolerance)
        for fqn, kept in states.items():
            torch.testing.assert_close(state[f"{MODEL}{fqn}"], weights[fqn], rtol=tolerance, atol=tolerance)
            for key, value in kept.items():
                torch.testing.assert_close(state[f"{OPTIMIZER}{fqn}/{key}"], value, rtol=10 * tolerance, atol=tolerance)
        assert state.keys() == {f"{MODEL}{f}" for f in states} | {f"{OPTIMIZER}{f}/{k}" for f in states for k in states[f]}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", ci_keeps([2], [1, 2, 3]))
def test_like_one_process(base, world_size):
    """Losses, norms, weights and moments of every stage are those of one process: accumulation, clipping, decay, idle ranks, a
    schedule.
    """
    found = run_on_ranks(trained_like_alone, world_size, base, (1, 2, 3), {})
    check(alone(base), found[0])


@pytest.mark.slow
@by_stage
def test_adapter(base, stage):
    """LoRA on a frozen model, which stage 3 divides too: adapters are trained as in one process."""
    found = run_on_ranks(trained_like_alone, 2, base, [stage], {"lora": True})
    check(alone(base, lora=True), found[0])


@pytest.mark.slow
@pytest.mark.lane
def test_adapter_on_a_bfloat16_model(base):
    """So are float32 adapters on a bfloat16 model, within its rounding: stage 3 adds up a layer's
    gradients in another order.
    """
    options = {"lora": True, "dtype": torch.bfloat16}
    found = run_on_ranks(trained_like_alone, 2, base, (1, 2, 3), options)
    check(alone(base, **options), found[0], losses=2**-7, norms=2e-2, tolerance=2e-3)


@pytest.mark.lane
@pytest.mark.slow
@by_stage
def test_activation_checkpointing(base, stage):
    """Activations that are computed anew change nothing."""
    found = run_on_ranks(trained_like_alone, 2, base, [stage], {"activation_checkpointing": True})
    check(alone(base), found[0])


HALF = 2


def saved_half_way(ranks, path, stage, options):
    run = Run(ranks, path, stage, **options)
    for k in range(HALF):
        run.step(k)
    return together(run.state())


def goes_on(ranks, path, stage, tensors, options):
    """Load a state into a fresh run; (state as it is then, losses of the steps that follow, final weights, final state)."""
    run = Run(ranks, path, stage, **options)
    run.strategy.load_state(run.model, run.optimizer, Saved(tensors))
    for _ in range(HALF):
        run.schedule.step()
    loaded = together(run.state())
    losses = [run.step(k)[0] for k in range(HALF, len(STEPS))]
    return loaded, losses, run.whole(), together(run.state())


def resumed(ranks, path, stage, options):
    """Return a stage's state at half time; from it the stage goes on with the same bits, the next one with the same losses."""
    run = Run(ranks, path, stage, **options)
    begin = together(run.state())
    assert begin.keys() == weights_of(begin).keys()
    for k in range(HALF):
        run.step(k)
    tensors = together(run.state())
    losses = [run.step(k)[0] for k in range(HALF, len(STEPS))]
    end = together(run.state())
    loaded, got, whole, last = goes_on(ranks, path, stage, tensors, options)
    assert equal(loaded, tensors)
    assert got == losses
    assert equal(last, end)
    for name, tensor in whole.items():
        if ranks.is_first and f"{MODEL}{name}" in end:
            assert torch.equal(tensor, end[f"{MODEL}{name}"])
    if not options:
        loaded, got, _, _ = goes_on(ranks, path, following(stage), tensors, options)
        assert equal(loaded, tensors)
        assert got == pytest.approx(losses, rel=1e-6)
    # Before the first step there are no moments, and a state of then can be loaded too.
    begun = Run(ranks, path, stage, **options)
    begun.strategy.load_state(begun.model, begun.optimizer, Saved(begin))
    assert equal(together(begun.state()), begin)
    begun.step(0)
    return tensors


def following(stage):
    return stage % 3 + 1


def weights_of(state):
    return {name: tensor for name, tensor in state.items() if name.startswith(MODEL)}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resumed_by(ranks, path, stage, tensors):
    """Return the losses that follow from a state, on another number of ranks than it was saved on."""
    loaded, losses, _, _ = goes_on(ranks, path, stage, tensors, {})
    assert equal(loaded, tensors)
    return losses


@pytest.mark.slow
@by_stage
def test_resume(base, stage):
    """A state saved on 2 ranks goes on with the same bits there, and with the same losses under another stage and on 1 and 3
    ranks.
    """
    expected = [loss for loss, _ in alone(base)[0][HALF:]]
    tensors = run_on_ranks(resumed, 2, base, stage, {})[0]
    for world_size in (1, 3):
        losses = run_on_ranks(resumed_by, world_size, base, following(stage), tensors)[0]
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.lane
@by_stage
def test_resume_of_an_adapter(base, stage):
    """Of an adapter only what is trained is in the state, and it goes on with the same bits."""
    state = run_on_ranks(resumed, 2, base, stage, {"lora": True})[0]
    assert all("lora_" in name for name in state)


def under_another(ranks, path, name, tensors):
    """A state of ZeRO goes on under ddp or fsdp2; the state that comes out, and the losses."""
    run = Run(ranks, path, name)
    run.strategy.load_state(run.model, run.optimizer, Saved(tensors))
    for _ in range(HALF):
        run.schedule.step()
    loaded = together(run.state())
    return equal(loaded, tensors), [run.step(k)[0] for k in range(HALF, len(STEPS))]


def between_strategies(ranks, path, name, stage):
    """ZeRO's state under ddp or fsdp2, and theirs under ZeRO."""
    tensors = saved_half_way(ranks, path, stage, {})
    found = [under_another(ranks, path, name, tensors)]
    tensors = saved_half_way(ranks, path, name, {})
    loaded, losses, _, _ = goes_on(ranks, path, stage, tensors, {})
    return [*found, (equal(loaded, tensors), losses)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), ci_keeps([], [("ddp", 3), ("fsdp2", 1), ("fsdp2", 3)]))
def test_between_strategies(base, name, stage):
    """Names, shapes and values are those of ddp and fsdp2: either goes on from the other's state."""
    expected = [loss for loss, _ in alone(base)[0][HALF:]]
    for same, losses in run_on_ranks(between_strategies, 2, base, name, stage)[0]:
        assert same
        assert losses == pytest.approx(expected, rel=1e-5)


def dropped(ranks, path, stage):
    """Steps that are not taken, the very first one among them, leave no trace, whether their gradients are sound or NaN."""
    plain, other = Run(ranks, path, stage), Run(ranks, path, stage)
    for k, factor in enumerate((1.0, float("nan"), float("inf"))):
        before = together(other.state())
        # One rank's loss is enough.
        _, norm = other.gradients(k + 1, factor if ranks.rank == ranks.world_size - 1 else 1.0)
        assert math.isfinite(norm) == (factor == 1.0)
        if factor != 1.0:
            with pytest.raises(StrategyError, match="NaN or infinite"):
                other.strategy.step(other.optimizer)
            other.gradients(k + 1, factor)
        other.strategy.scale_grads(other.parameters(), 0.1)
        other.strategy.zero_grad(other.optimizer)
        assert equal(together(other.state()), before)
        assert other.step(k) == plain.step(k)
    assert equal(together(other.state()), together(plain.state()))


@pytest.mark.slow
@by_stage
def test_a_dropped_step_leaves_no_trace(base, stage):
    """Gradients that no step used are gone: the next step, the weights and the moments are as if they had never been."""
    run_on_ranks(dropped, 2, base, stage)


def looked_at(ranks, path, stage):
    """What a caller sees of a model: whole tensors, modes, dtypes under autocast."""
    from safetensors.torch import load_file

    from forge_dist import load_model

    stored, plain = load_file(Path(path) / "model.safetensors"), load_model(path, dtype=torch.float32, device="cpu")
    ids = sample(0, 0, 0, 7)
    with torch.no_grad():
        expected = plain(input_ids=ids, use_cache=False).logits
        with torch.autocast("cpu", torch.bfloat16):
            rounded = plain(input_ids=ids, use_cache=False).logits
    run = Run(ranks, path, stage)
    assert not run.model.training
    whole = run.whole()
    assert list(whole) == [name for name in plain.state_dict() if name in stored]
    for name, tensor in whole.items():
        assert tensor is None if not ranks.is_first else torch.equal(tensor, stored[name])
    with torch.no_grad():
        assert torch.equal(run.model(input_ids=ids, use_cache=False).logits, expected)
        with torch.autocast("cpu", torch.bfloat16):
            logits = run.model(input_ids=ids, use_cache=False).logits
        assert logits.dtype == rounded.dtype
        assert torch.equal(logits, rounded)
        assert not torch.is_autocast_enabled("cpu")
    run.model.train()
    assert all(module.training for module in run.model.modules())
    run.model.eval()
    assert not any(module.training for module in run.model.modules())
    if stage == 3:
        held = sum(parameter.ds_tensor.numel() for parameter in run.model.parameters())
        assert held <= sum(parameter.numel() for parameter in plain.parameters()) / ranks.world_size + 100


@pytest.mark.slow
@by_stage
def test_what_a_caller_sees(base, stage):
    """Whole tensors are the file's bits, tied ones once; forwards without training and under autocast are those of the plain
    model.
    """
    run_on_ranks(looked_at, 2, base, stage)


def froze_less(ranks, path, stage):
    """Load states of a version that trained a weight which is frozen now: whether it had moved, or has moments."""
    name, run = "model.norm.weight", Run(ranks, path, stage, frozen=["model.norm.weight"])
    for k in range(HALF):
        run.step(k)
    now = together(run.state())
    whole = run.whole()
    weight = whole[name] if ranks.is_first else None
    old = now | {f"{MODEL}{name}": torch.tensor(ranks.broadcast(weight if weight is None else weight.tolist()))}
    layer = "model.layers.0.input_layernorm.weight"
    old |= {f"{OPTIMIZER}{name}/{key}": torch.zeros_like(now[f"{OPTIMIZER}{layer}/{key}"]) for key in ("exp_avg", "exp_avg_sq")}
    old |= {f"{OPTIMIZER}{name}/step": now[f"{OPTIMIZER}{layer}/step"]}
    loaded, *_ = goes_on(ranks, path, stage, old, {"frozen": [name]})
    assert equal(loaded, now)
    for moved in (f"{MODEL}{name}", f"{OPTIMIZER}{name}/exp_avg"):
        with pytest.raises(CheckpointError, match=f"{MODEL}{name} learned there, and is frozen here"):
            goes_on(ranks, path, stage, old | {moved: old[moved] + 1}, {"frozen": [name]})


def refused(ranks, path, broken):
    """Messages of what cannot be loaded."""
    messages = []
    for directory in broken:
        try:
            Run(ranks, directory, 3)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    tensors = saved_half_way(ranks, path, 3, {})
    name = next(name for name in tensors if name.endswith("q_proj.weight/exp_avg"))
    for stage in (1, 3):
        run = Run(ranks, path, stage)
        before = together(run.state())
        for change in (
            lambda t: t.pop(name),
            lambda t: t.update({f"{MODEL}other": torch.zeros(2)}),
            lambda t: t.update({name: torch.zeros(3, 3)}),
            lambda t: t.update({f"{name.rpartition('/')[0]}/step": torch.tensor(7.0)}),
        ):
            changed = dict(tensors)
            change(changed)
            try:
                run.strategy.load_state(run.model, run.optimizer, Saved(changed))
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
            assert equal(together(run.state()), before)
    try:
        run.strategy.wrap(run.strategy.load(path, dtype=torch.bfloat16), adamw)
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    for stage in (1, 3):
        froze_less(ranks, path, stage)
    return messages


@pytest.mark.slow
def test_what_does_not_fit(save_base):
    """Files and states that do not fit are refused by name, on every rank, before anything changed.

    A weight that is frozen now is no misfit, unless it had learned.
    """
    from safetensors.torch import load_file, save_file

    path, broken = save_base(), []
    for which, change in {
        "missing": lambda t: t.pop("model.norm.weight"),
        "unexpected": lambda t: t.update({"score.weight": torch.zeros(2)}),
        "shape": lambda t: t.update({"model.norm.weight": torch.zeros(5)}),
    }.items():
        broken.append(save_base(name=which))
        file = Path(broken[-1]) / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    results = run_on_ranks(refused, 2, path, broken)
    assert results[0] == results[1]
    moment = r"optimizer/model\.layers\.0\.self_attn\.q_proj\.weight"
    states = [
        rf"CheckpointError: .*lacks {moment}/exp_avg$",
        r"CheckpointError: .*has model/other, which is not part of the run",
        rf"CheckpointError: .*{moment}/exp_avg is torch\.float32 \[3, 3\] there and torch\.float32 \[16, 16\] here",
        r"CheckpointError: .*counts steps once",
    ]
    patterns = [
        r"ModelError: .*missing lacks weight model\.norm\.weight",
        r"ModelError: .*unexpected has the unexpected weight score\.weight",
        r"ModelError: .*shape has another shape of weight model\.norm\.weight",
        *states,
        *states,
        r"StrategyError: strategy=zero3 trains float32 weights",
    ]
    assert len(results[0]) == len(patterns)
    for message, pattern in zip(results[0], patterns, strict=True):
        assert re.match(pattern, message), message


@pytest.mark.slow
def test_no_chatter_and_no_compiler(base, tmp_path):
    """A run prints nothing, compiles nothing, loads no compiler, and leaves no variable that would confuse the next run of the
    process.
    """
    script = f"""
import os, sys, torch, forge_dist
for stage in (1, 3):
    with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings())) as ranks:
        ranks.connect("gloo", torch.device("cpu"))
        settings = forge_dist.StrategySettings(strategy=f"zero{{stage}}")
        strategy = forge_dist.make_strategy(settings, ranks, device=torch.device("cpu"), adapter=False)
        model = strategy.load({base!r}, dtype=torch.float32)
        model, optimizer = strategy.wrap(model, lambda model: torch.optim.AdamW(model.parameters()))
        with strategy.micro_batch(True):
            strategy.backward(model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False).logits.sum())
        strategy.step(optimizer)
        strategy.state(model, optimizer)
    assert "LOCAL_RANK" not in os.environ
assert "torch._inductor.compile_fx" not in sys.modules
"""
    environ = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "DS_ACCELERATOR": "cpu"}
    del environ["DS_ACCELERATOR"]
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=480, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "extensions").exists()


class Alone:
    rank = local_rank = 0
    world_size = local_world_size = 1
    is_first = True


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_missing_extra(monkeypatch, stage):
    """Without DeepSpeed, or what transformers needs beside it, the command that installs it is named
    before anything is read.
    """
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("deepspeed", "accelerate") else find(name))
    missing = "deepspeed and accelerate" if stage == 3 else "deepspeed"
    with pytest.raises(StrategyError, match=rf"strategy=zero{stage} needs {missing}: `pip install 'forge-dist\[deepspeed\]'`"):
        make_strategy(StrategySettings(strategy=f"zero{stage}"), Alone(), device=torch.device("cpu"), adapter=False)


def test_offload_needs_a_device_to_offload_from():
    """On the CPU there is nothing to offload from."""
    settings = StrategySettings(strategy="zero2", cpu_offload=True)
    with pytest.raises(StrategyError, match="cpu_offload has no effect"):
        make_strategy(settings, Alone(), device=torch.device("cpu"), adapter=False)
