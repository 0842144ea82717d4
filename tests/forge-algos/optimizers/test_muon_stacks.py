"""Muon on stacks of matrices: what torch.optim.Muon does to one matrix at a time."""

import copy

import pytest
import torch

from forge_algos import AdapterSettings, OptimizerError, OptimizerSettings, adapt, make_optimizer
from forge_algos.optimizers._muon_stacks import StackedMuon, muon_stacks, orthogonalized

from ..experts import E, mixture

SETTINGS = OptimizerSettings(optimizer="muon", learning_rate=0.02, weight_decay=0.1, momentum=0.9)
LIBRARY = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
ADAPTERS = {
    "none": {},
    "lora": {"adapter": "lora", "lora_r": 3},
    "osft": {"adapter": "osft", "target_modules": ("experts",)},
    "factors": {"adapter": "osft", "osft_form": "factors", "target_modules": ("experts",)},
}


def one_by_one(name, tensor):
    """Return the matrices of a parameter of experts, by what the layouts are documented to be."""
    if tensor.ndim == 3:
        return list(tensor)
    if "lora_A" in name:
        return list(tensor.reshape(E, -1, tensor.shape[1]))
    return [tensor[:, e::E] for e in range(E)]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_each_matrix_moves_as_by_torchs_muon(adapter):
    """Full weights, LoRA's factors and OSFT's matrices of experts move as single matrices under torch.optim.Muon.
    Three steps with momentum and weight decay; the products are bfloat16's on both sides.
    """
    model = adapt(mixture("gpt_oss"), AdapterSettings(**ADAPTERS[adapter])).model
    optimizer = make_optimizer(model, SETTINGS)
    names = {id(p): name for name, p in model.named_parameters()}
    stacks = [p for group in optimizer.param_groups if group["algorithm"] == "muon_stacks" for p in group["params"]]
    held = {names[id(p)] for p in stacks}
    assert {name for name in names.values() if "experts" in name and "bias" not in name and "values" not in name} >= held
    assert len(held) == {"none": 4, "lora": 8, "osft": 4, "factors": 8}[adapter]
    single = {id(p): [torch.nn.Parameter(m.detach().clone()) for m in one_by_one(names[id(p)], p)] for p in stacks}
    library = torch.optim.Muon([m for matrices in single.values() for m in matrices], **LIBRARY)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
        for p in stacks:
            for matrix, gradient in zip(single[id(p)], one_by_one(names[id(p)], p.grad), strict=True):
                matrix.grad = gradient.clone()
        optimizer.step()
        library.step()
    for p in stacks:
        for ours, theirs in zip(one_by_one(names[id(p)], p.detach()), single[id(p)], strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=2e-4)


def test_vectors_of_experts_are_no_matrices():
    """Biases of experts and their trained singular values are AdamW's, and do not decay."""
    for adapter, ends in (("none", "_bias"), ("factors", "values")):
        model = adapt(mixture("gpt_oss"), AdapterSettings(**ADAPTERS[adapter])).model
        vectors = {id(p) for name, p in model.named_parameters() if name.endswith(ends)}
        assert len(vectors) == 4
        for settings in (SETTINGS, OptimizerSettings(learning_rate=0.1, weight_decay=0.1)):
            groups = make_optimizer(model, settings).param_groups
            for group in groups:
                if vectors & {id(p) for p in group["params"]}:
                    assert group["weight_decay"] == 0
                    assert group.get("algorithm", "adamw") == "adamw"


def test_singular_values_become_alike():
    """The singular values of each matrix of a batch come close to 1, of tall and wide ones, whatever their sizes."""
    for shape in ((5, 8, 20), (5, 20, 8)):
        G = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None, None]
        values = torch.linalg.svdvals(orthogonalized(G).float())
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_a_saved_state_continues_to_the_bit():
    """A saved and loaded state of stacks moves on with the bits of an uninterrupted run; experts without tokens wait."""
    model = mixture()
    group = muon_stacks(model)
    optimizer = StackedMuon(group, lr=0.02, momentum=0.9, weight_decay=0.0)
    stack = group[0]["params"][0]
    stack.grad = torch.randn(stack.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    again = copy.deepcopy(stack)
    other = StackedMuon([{"params": [again], "layout": "stack", "experts": E}], lr=0.5, momentum=0.1, weight_decay=0.5)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["params"] = [0]
    other.load_state_dict({"state": {0: saved["state"][0]}, "param_groups": saved["param_groups"]})
    for p, moved_by in ((stack, optimizer), (again, other)):
        p.grad = torch.ones_like(p)
        moved_by.step()
    assert torch.equal(stack, again)
    untouched = group[0]["params"][1].detach().clone()
    optimizer.step()
    assert torch.equal(group[0]["params"][1], untouched)


def test_stacks_divided_otherwise_than_by_matrices_are_refused():
    """A stack of which a rank holds parts of matrices cannot be moved matrix by matrix."""
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        whole = torch.randn(E, 6, 8)
        for dim in (0, 1):
            stack = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(dim)]))
            groups = [{"params": [stack], "layout": "stack", "experts": E}]
            options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
            if dim:
                with pytest.raises(OptimizerError, match="divided into whole matrices"):
                    StackedMuon(groups, **options)
                continue
            plain = torch.nn.Parameter(whole.clone())
            for p, part in ((stack, groups), (plain, [{**groups[0], "params": [plain]}])):
                p.grad = torch.ones_like(p)
                StackedMuon(part, **options).step()
            assert torch.equal(stack.full_tensor(), plain)
    finally:
        distributed.destroy_process_group()
