"""Blocks of a small decoder, compiled: the same numbers, one graph, hooks and names untouched."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from forge_accel import CompiledBlocks, document_attention
from forge_accel.fused import _compiled_blocks

from ...lanes import ci_keeps

pytestmark = pytest.mark.slow

ROWS = [(5, 9, 30), (7, 8), (40,), (3, 3, 3, 3, 3), (17, 2, 60), (100, 20)]
"""Lengths of the samples of six packed rows, in rows of six sizes."""


class Block(nn.Module):
    """A decoder block with grouped heads and document attention."""

    def __init__(self, dropout: float = 0.0, window: int | None = None) -> None:
        super().__init__()
        self.norm, self.is_causal, self.window, self.dropout = nn.RMSNorm(32), True, window, nn.Dropout(dropout)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, hidden: torch.Tensor, *, cu_seq_lens_q: torch.Tensor, max_length_q: int) -> torch.Tensor:
        x = self.norm(hidden)
        states = [
            part(x).view(1, -1, heads, 8).transpose(1, 2) for part, heads in ((self.query, 4), (self.key, 2), (self.value, 2))
        ]
        more = {"sliding_window": self.window, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_q}
        hidden = hidden + document_attention(self, *states, **more, max_length_q=max_length_q)[0].flatten(2)
        return hidden + self.dropout(self.down(nn.functional.silu(self.up(self.norm(hidden)))))


def made(number: int = 3, **how) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(**how) for _ in range(number))


def step(blocks: nn.ModuleList, lengths: tuple[int, ...], call=lambda block, *args, **kwargs: block(*args, **kwargs)):
    """The output of all blocks on a packed row, and the gradients of its weighted sum."""
    blocks.zero_grad()
    hidden = torch.randn(1, sum(lengths), 32, generator=torch.Generator().manual_seed(sum(lengths)), requires_grad=True)
    out, ends = hidden, torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    for block in blocks:
        out = call(block, out, cu_seq_lens_q=ends, max_length_q=max(lengths))
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return out.detach(), hidden.grad, [p.grad.clone() for p in blocks.parameters()]


def compiled(
    blocks: nn.ModuleList, backend: str = "aot_eager", **how
) -> tuple[CompiledBlocks, CompileCounterWithBackend, list[str]]:
    """Compile blocks; the backend `eager` makes no graph of the backward, where a promise is not about that."""
    counter, notes = CompileCounterWithBackend(backend), []
    return CompiledBlocks(list(blocks), backend=counter, note=notes.append, **how), counter, notes


def same(ours, theirs) -> None:
    for one, other in zip(*map(_flat, (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", ci_keeps([None], [None, 4]))
def test_one_graph_for_all_blocks_and_row_sizes(window):
    """Outputs and gradients are the block's own over six row sizes, from one graph; nothing is compiled anew."""
    plain, blocks = made(window=window), made(window=window)
    compiling, counter, notes = compiled(blocks)
    for lengths in ROWS:
        for ours, theirs in zip(*map(_flat, (step(blocks, lengths), step(plain, lengths))), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert compiling.problem is None
    assert counter.frame_count == 1
    assert len(notes) == 1
    assert "one graph" in notes[0]


def test_checkpointed_blocks_are_one_graph_too():
    """Under activation checkpointing the recomputed forward is compiled as well."""
    plain, blocks = made(), made()
    compiling, counter, _ = compiled(blocks)

    def again(block, *args, **kwargs):
        return checkpoint(block, *args, use_reentrant=False, **kwargs)

    for lengths in ROWS[:3]:
        for ours, theirs in zip(*map(_flat, (step(blocks, lengths, again), step(plain, lengths))), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert compiling.problem is None
    assert counter.frame_count == 1


def test_names_hooks_copies_and_evaluation_stay():
    """The state dict keeps its names, hooks run, a copy and an evaluation compute by the block itself; `remove`."""
    blocks = made(1)
    names, seen = list(blocks.state_dict()), []
    blocks[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    compiling, counter, _ = compiled(blocks, "eager")
    assert list(blocks.state_dict()) == names
    step(blocks, (5, 3))
    twin = copy.deepcopy(blocks)
    with torch.no_grad():
        twin[0].down.weight.zero_()
        row = {"cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32), "max_length_q": 4}
        assert not torch.equal(twin[0](torch.ones(1, 4, 32), **row), blocks[0](torch.ones(1, 4, 32), **row))
    assert len(seen) == 3
    assert counter.frame_count == 1, "a forward without gradients was compiled"
    compiling.remove()
    assert "forward" not in vars(blocks[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deep", "pickled"])
def test_a_copy_of_compiled_blocks_is_uncompiled_and_can_be_compiled(copied):
    """A deep copy, and one that was pickled, computes by its class's forward; it is compiled when it is asked for."""
    plain, blocks = made(2), made(2)
    compiling, counter, _ = compiled(blocks, "eager")
    same(step(blocks, (5, 3)), step(plain, (5, 3)))
    twin = copied(blocks)
    for ours, theirs in zip(*map(_flat, (step(twin, (6, 4)), step(plain, (6, 4)))), strict=True):
        assert torch.equal(ours, theirs)
    anew, its_counter, _ = compiled(twin, "eager")
    same(step(twin, (5, 3)), step(plain, (5, 3)))
    assert (compiling.problem, counter.frame_count) == (anew.problem, its_counter.frame_count) == (None, 1)
    anew.remove()
    assert "forward" not in vars(twin[0])


class Keeps:
    """A hook that keeps what a layer put out."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        self.outputs = outputs

    def __call__(self, _module: nn.Module, _args: tuple, out: torch.Tensor) -> None:
        self.outputs.append(out)


def test_a_hook_that_keeps_outputs_of_a_layer():
    """It is called once a forward and what it kept can be learned from: its block is not compiled while it has the hook."""
    plain, blocks = made(2), made(2)
    compiling, counter, notes = compiled(blocks)
    kept = [], []

    def step_with_kept(model, outputs):
        model.zero_grad()
        hidden, ends = torch.ones(1, 8, 32, requires_grad=True), torch.tensor([0, 5, 8], dtype=torch.int32)
        for block in model:
            hidden = block(hidden, cu_seq_lens_q=ends, max_length_q=5)
        (hidden.square().sum() + sum(out.abs().sum() for out in outputs)).backward()
        return [weight.grad for weight in model.parameters()]

    for forwards in (1, 2):
        handles = [
            model[1].down.register_forward_hook(Keeps(outputs)) for model, outputs in zip((plain, blocks), kept, strict=True)
        ]
        ours, theirs = step_with_kept(blocks, kept[1]), step_with_kept(plain, kept[0])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert [len(outputs) for outputs in kept] == [1, 1]
        for handle, outputs in zip(handles, kept, strict=True):
            handle.remove()
            outputs.clear()
        # A block that is compiled by now calls a hook that comes later, too.
        same(step(blocks, (5, 3)), step(plain, (5, 3)))
        assert (compiling.problem, counter.frame_count, kept) == (None, 1, ([], [])), forwards
    told = [note for note in notes if "hooks" in note]
    assert len(told) == 1
    assert "Block runs uncompiled while its layers have hooks" in told[0]
    assert "Keeps of down)" in told[0]


def test_hooks_of_the_caller_are_compiled():
    """Those that it says are its own, and no later one."""
    plain, blocks = made(1), made(1)
    for model in (plain, blocks):
        model[0].down.register_forward_hook(lambda _module, _args, out: out * 2)
    compiling, counter, notes = compiled(blocks, own_hooks=True)
    same(step(blocks, (5, 3)), step(plain, (5, 3)))
    assert (compiling.problem, counter.frame_count, len(notes)) == (None, 1, 1)
    for model in (plain, blocks):
        model[0].up.register_full_backward_hook(lambda _module, given, _out: (given[0] * 2,))
    same(step(blocks, (5, 3)), step(plain, (5, 3)))
    assert "of up" in notes[1]


def test_a_layer_that_is_replaced_is_tried_and_its_hooks_are_called():
    """A block with another layer, or one more within a layer, is compared anew, and left while the new layer has hooks."""
    plain, blocks, calls = made(2), made(2), []
    compiling, counter, notes = compiled(blocks)
    same(step(blocks, (5, 3)), step(plain, (5, 3)))
    for model in (plain, blocks):
        torch.manual_seed(1)
        model[1].down = nn.Linear(48, 32, bias=False)
        nn.utils.parametrize.register_parametrization(model[0].up, "weight", Doubled())
    trials, proves = [], compiling._proves
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiling, "_proves", lambda block, *rest: trials.append(block) or proves(block, *rest))
        same(step(blocks, (5, 3)), step(plain, (5, 3)))
        same(step(blocks, (6, 2)), step(plain, (6, 2)))
    assert (trials, compiling.problem, counter.frame_count) == ([*blocks], None, 3)
    blocks[1].down.register_forward_hook(lambda *_: calls.append("down"))
    blocks[0].up.parametrizations.weight[0].register_forward_hook(lambda *_: calls.append("up"))
    same(step(blocks, (5, 3)), step(plain, (5, 3)))
    assert calls == ["up", "down"]
    assert "uncompiled while its layers have hooks" in notes[-1]


class Doubled(nn.Module):
    """A parametrization: the weight twice."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_a_hook_on_a_weights_gradient_is_called_once():
    """The gradients of a trial are not those of the run."""
    plain, blocks, seen = made(1), made(1), []
    compiling, counter, _ = compiled(blocks)
    blocks[0].down.weight.register_hook(seen.append)
    same(step(blocks, (5, 3)), step(plain, (5, 3)))
    assert len(seen) == 1
    same(step(blocks, (9, 4)), step(plain, (9, 4)))
    assert (len(seen), compiling.problem, counter.frame_count) == (2, None, 1)


def test_blocks_run_compiled_on_all_ranks_or_on_none():
    """What another rank cannot compile does not run compiled here, and the log says so."""
    blocks = made(2)
    compiling, counter, notes = compiled(blocks)
    step(blocks, (5, 3))
    asked = []
    compiling.agree(lambda problem: asked.append(problem) or "no compiler (rank 1)")
    assert asked == [None]
    assert compiling.problem == "no compiler (rank 1)"
    assert notes[-1] == "WARNING: compile: the blocks run uncompiled: no compiler (rank 1)"
    plain = made(2)
    for ours, theirs in zip(*map(_flat, (step(blocks, (6, 4)), step(plain, (6, 4)))), strict=True):
        assert torch.equal(ours, theirs)
    assert counter.frame_count == 1


class Branching(Block):
    """A block that looks at its numbers."""

    def forward(self, hidden: torch.Tensor, **rest) -> torch.Tensor:
        return super().forward(hidden if hidden.sum() < 1e9 else hidden * 2, **rest)


class Wrong(Block):
    """A block that computes something else once it is compiled."""

    def forward(self, hidden: torch.Tensor, **rest) -> torch.Tensor:
        out = super().forward(hidden, **rest)
        return out * 1.01 if torch.compiler.is_compiling() else out


class WrongBackward(Block):
    """A block that learns something else once it is compiled."""

    def forward(self, hidden: torch.Tensor, **rest) -> torch.Tensor:
        out = super().forward(hidden, **rest)
        return out.detach() + 1.01 * (out - out.detach()) if torch.compiler.is_compiling() else out


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Branching, "Unsupported"),
        (Wrong, "first outputs differ from the block's own"),
        (WrongBackward, "first gradients differ from the block's own"),
    ],
)
def test_what_cannot_be_compiled_runs_as_it_stands(kind, why):
    """A block with a graph break, or with other numbers when compiled, trains uncompiled, and the log says why."""
    torch.manual_seed(0)
    plain = nn.ModuleList([kind(), kind()])
    blocks = copy.deepcopy(plain)
    compiling, _, notes = compiled(blocks, "eager")
    for ours, theirs in zip(*map(_flat, (step(blocks, (5, 3)), step(plain, (5, 3)))), strict=True):
        assert torch.equal(ours, theirs)
    assert why in (compiling.problem or "")
    assert len([note for note in notes if note.startswith("WARNING")]) == 1


@pytest.mark.parametrize("again", ci_keeps([True], [False, True]))
def test_a_compiler_that_fails_in_the_backward_ends_no_run(again):
    """The backward is compiled before the run's own: where that fails, nothing of the step is lost."""

    def refuses(graph, inputs):
        raise RuntimeError("no kernel for this backward")

    plain, blocks, notes = made(2), made(2), []
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=refuses)
    compiling = CompiledBlocks(list(blocks), backend=backend, note=notes.append)

    def call(block, *args, **kwargs):
        return checkpoint(block, *args, use_reentrant=False, **kwargs) if again else block(*args, **kwargs)

    for ours, theirs in zip(*map(_flat, (step(blocks, (5, 3), call), step(plain, (5, 3)))), strict=True):
        assert torch.equal(ours, theirs)
    assert "no kernel for this backward" in (compiling.problem or "")
    assert len(notes) == 1


class Layered(Block):
    """A block that has further layers, or not."""

    def __init__(self, *, further: bool) -> None:
        super().__init__()
        self.further = nn.Sequential(nn.Linear(32, 32), nn.Tanh()) if further else nn.Identity()

    def forward(self, hidden: torch.Tensor, **rest) -> torch.Tensor:
        return self.further(super().forward(hidden, **rest))


def test_each_block_of_a_class_is_tried():
    """Blocks of one class have graphs of their own where their layers differ: one whose backward fails ends no run."""
    made_graphs = []

    def second_refuses(graph, inputs):
        made_graphs.append(graph)
        if len(made_graphs) > 1:
            raise RuntimeError("no kernel for the second backward")
        return make_boxed_func(graph)

    torch.manual_seed(0)
    plain = nn.ModuleList([Layered(further=False), Layered(further=True)])
    blocks = copy.deepcopy(plain)
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=second_refuses)
    compiling = CompiledBlocks(list(blocks), backend=backend)
    for ours, theirs in zip(*map(_flat, (step(blocks, (5, 3)), step(plain, (5, 3)))), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert "second backward" in (compiling.problem or "")


def test_a_block_that_was_compiled_is_computed_again_as_it_was():
    """Checkpointed, a block whose successor cannot be compiled stays compiled in the step; after `agree` none is."""
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(), Branching()])
    blocks = copy.deepcopy(plain)
    compiling, counter, _ = compiled(blocks)

    def again(block, *args, **kwargs):
        return checkpoint(block, *args, use_reentrant=False, **kwargs)

    same(step(blocks, (5, 3), again), step(plain, (5, 3)))
    assert "Unsupported" in (compiling.problem or "")
    compiling.agree(lambda problem: problem)
    for ours, theirs in zip(*map(_flat, (step(blocks, (5, 3), again), step(plain, (5, 3)))), strict=True):
        assert torch.equal(ours, theirs)
    assert counter.frame_count == 1


class Counting(Block):
    """A block that counts its forwards, and takes its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, hidden: torch.Tensor, other: torch.Tensor, **rest) -> torch.Tensor:
        self.count += 1
        return super().forward(hidden, **rest) + other


def test_buffers_count_once_and_a_tensor_given_twice_is_one():
    """What a forward changes in its buffers is changed by the run's own forward alone, from the graph that was tried."""
    torch.manual_seed(0)
    plain = nn.ModuleList([Counting()])
    blocks = copy.deepcopy(plain)
    compiling, counter, _ = compiled(blocks)

    def twice(block, out, **row):
        return block(out, out, **row)

    for ours, theirs in zip(*map(_flat, (step(blocks, (5, 3), twice), step(plain, (5, 3), twice))), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert blocks[0].count == plain[0].count == 1
    assert (compiling.problem, counter.frame_count) == (None, 1)


def test_what_ends_a_run_is_no_fault_of_a_compiler():
    """An error with an exit status, raised while a block compiles, passes; one of the comparison is a reason to give up."""

    class StoppedError(Exception):
        exit_status = 1

    def interrupted(graph, inputs):
        raise StoppedError("stalled")

    blocks = made(1)
    CompiledBlocks(list(blocks), backend=interrupted)
    with pytest.raises(StoppedError, match="stalled"):
        step(blocks, (5, 3))
    looped, cause = ValueError("looped"), ValueError("cause")
    looped.__cause__, cause.__cause__ = cause, looped
    assert _compiled_blocks._ending(looped) is None
    blocks = made(1)
    compiling, _, _ = compiled(blocks, "eager")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_compiled_blocks, "_norm", lambda _: {}["norm"])
        step(blocks, (5, 3))
    assert "KeyError" in (compiling.problem or "")


@pytest.mark.parametrize("frozen", ci_keeps(["weights", "all but the output's"], ["inputs", "weights", "all but the output's"]))
def test_frozen_inputs_and_weights(frozen):
    """An adapter's first block has inputs that nothing learns from, and blocks weights that are frozen."""
    plain, blocks = made(2), made(2)
    for model in (plain, blocks):
        for name, weight in model.named_parameters():
            weight.requires_grad_(frozen == "inputs" or (frozen != "weights" and "down" in name))
    compiling, counter, _ = compiled(blocks)
    found = []
    for model in (blocks, plain):
        hidden = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(1), requires_grad=frozen == "weights")
        out = hidden
        for block in model:
            out = block(out, cu_seq_lens_q=torch.tensor([0, 5, 8], dtype=torch.int32), max_length_q=5)
        out.square().sum().backward()
        found.append([out.detach(), *(w.grad for w in [hidden, *model.parameters()] if w.grad is not None)])
    assert len(found[0]) > 1
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert compiling.problem is None
    assert counter.frame_count == (1 if frozen == "weights" else 2)


class Constant(Block):
    """Block whose graph has a constant of its own."""

    def forward(self, hidden: torch.Tensor, **rest) -> torch.Tensor:
        return super().forward(hidden * 2 if self.name.startswith("double") else hidden + len(self.name), **rest)


def test_a_model_may_have_more_graphs_than_torch_allows_by_itself():
    """Ten, as rows with and without shared prefixes, longer and shorter than a window, make of LoRA's blocks."""
    blocks = nn.ModuleList([Constant() for _ in range(10)])
    for number, block in enumerate(blocks):
        block.name = "x" * number
    with torch._dynamo.config.patch(recompile_limit=8):
        compiling, counter, _ = compiled(blocks, "eager")
        step(blocks, (5, 3))
    assert compiling.problem is None
    assert counter.frame_count >= len(blocks)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_more_constants_than_torch_keeps_graphs_for_end_no_run():
    """Blocks that differ by a constant each have a graph of their own; beyond torch's limit they run as they stand."""
    torch.manual_seed(0)
    plain = nn.ModuleList([Constant() for _ in range(4)])
    for number, block in enumerate(plain):
        block.name = "x" * number
    blocks = copy.deepcopy(plain)
    compiling, _, _ = compiled(blocks, "eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for ours, theirs in zip(*map(_flat, (step(blocks, (5, 3)), step(plain, (5, 3)))), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert "FailOnRecompileLimitHit" in (compiling.problem or "")


@pytest.mark.lane
def test_dropout_draws_and_is_not_compared():
    """A block with dropout is compiled; its first outputs, which are random, are not held against each other."""
    blocks = made(2, dropout=0.5)
    compiling, counter, notes = compiled(blocks)
    first, second = step(blocks, (6, 4))[0], step(blocks, (6, 4))[0]
    assert not torch.equal(first, second)
    assert compiling.problem is None
    assert counter.frame_count == 1
    assert "not compared" in notes[0]


def _flat(found) -> list[torch.Tensor]:
    out, grad, grads = found
    return [out, grad, *grads]
