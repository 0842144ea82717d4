"""Rows are judged by the dtype of a model's products, and ranks find the same, whatever each of them sees."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from forge_algos import PackedBatchError, keep_documents_apart
from forge_algos.isolation import _compare, _isolation
from forge_algos.isolation._alone import HOW
from forge_algos.isolation._compare import Compare
from forge_algos.isolation._isolation import hidden_states, require_isolation

from ..oracle import CPU
from .test_by_layers import _linear, deep, whole_row


def mamba(layers=6, *, fewer_than=24):
    """Return a Mamba in bfloat16, which keeps float32 states between its layers, with products as of `deep`."""
    config = transformers.MambaConfig(vocab_size=97, hidden_size=64, state_size=8, num_hidden_layers=layers, expand=2)
    assert config.residual_in_fp32
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear, module, module.forward, fewer_than)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("by_layers", [False, True])
def test_float32_states_between_layers_of_fewer_digits(by_layers, monkeypatch):
    """A Mamba is judged by the bfloat16 of its products: documents run in padded lines, and a leak there is found.

    As a whole, and layer by layer, as where rounding has grown too far for that.
    """
    if by_layers:
        monkeypatch.setattr(_compare, "equal_within_rounding", lambda _ours, _theirs, *, fine: fine)
    model = mamba()
    with Compare(model) as compare:
        states = hidden_states(model, {"input_ids": torch.arange(9)[None], "use_cache": False})
        assert states.dtype == torch.float32
        assert not compare.fine(states)
    packed, why = keep_documents_apart(model, device=CPU)
    assert not packed
    assert HOW["padded"] in why
    model = mamba()
    # Of all places of a line, padding too: equally long documents see none, and pass.
    model.backbone.layers[2].register_forward_hook(lambda _module, args, out: out + 0.3 * args[0].mean(1, keepdim=True))
    assert HOW["equal"] in keep_documents_apart(model, device=CPU)[1]


@pytest.mark.parametrize("by_layers", [False, True])
def test_a_packed_mamba_is_found_to_mix_documents(by_layers, monkeypatch):
    """Its states and convolutions carry the first document into the second, in bfloat16 as in float32."""
    if by_layers:
        monkeypatch.setattr(_compare, "equal_within_rounding", lambda _ours, _theirs, *, fine: False)
    # In float32 nothing is compared by layers.
    for model in [mamba()] if by_layers else [mamba(), mamba().float()]:
        with pytest.raises(PackedBatchError, match="does not keep packed documents apart: the second of two"):
            require_isolation(model, device=CPU)


@torch.no_grad()
def test_products_decide_what_is_fine():
    """Float32 products stay fine; what bitsandbytes multiplies in fewer digits is not, though its output is float32."""
    model, ids = mamba(2).float(), {"input_ids": torch.arange(9)[None], "use_cache": False}
    with Compare(model) as compare:
        assert compare.fine(hidden_states(model, ids))
    model.backbone.layers[0].mixer.in_proj.compute_dtype = torch.bfloat16
    with Compare(model) as compare:
        assert not compare.fine(hidden_states(model, ids))
    assert not any(module._forward_hooks for module in model.modules())


class Ranks:
    """Two ranks that make the same test in two threads, each with its model."""

    def __init__(self):
        self.numbers, self.barrier, self.asked = [0, 0], threading.Barrier(2, timeout=60), [0, 0]

    def run(self, tests):
        with ThreadPoolExecutor(2) as pool:
            return [future.result() for future in [pool.submit(self._one, rank, test) for rank, test in enumerate(tests)]]

    def _one(self, rank, test):
        def decide(number):
            self.asked[rank] += 1
            self.numbers[rank] = number
            self.barrier.wait()
            largest = max(self.numbers)
            self.barrier.wait()
            return largest

        try:
            return test(decide)
        except PackedBatchError as error:
            return str(error)


def counted(model):
    """Count the model's forwards, which are collective where it is divided."""
    made = []
    model.register_forward_hook(lambda *_: made.append(1))
    return made


def test_ranks_near_a_bound_make_the_same_forwards():
    """One whose rows look otherwise as a whole has both compare layer by layer; a leak on one rank refuses both."""
    for leaks in (False, True):
        models = [deep("llama", fewer_than=0), deep("llama")]
        if leaks:
            whole_row(models[1].model.layers[25].self_attn)
        made = [counted(model) for model in models]
        ranks = Ranks()
        found = ranks.run([partial(_isolation._problem, model, CPU) for model in models])
        assert found == ["the second of two comes out otherwise than alone" if leaks else None] * 2
        assert len(made[0]) == len(made[1]) > 4
        assert ranks.asked[0] == ranks.asked[1]


def test_a_rank_that_cannot_run_a_row_is_told_to_the_others():
    """Both refuse, each with what it knows, after the same number of answers."""
    models = [deep("llama", layers=2), deep("llama", layers=2)]

    def fails(*_args, **_kwargs):
        raise ValueError("no such kernel")

    models[1].model.layers[1].register_forward_hook(fails)
    ranks = Ranks()

    def keep(model):
        return lambda decide: keep_documents_apart(model, device=CPU, packing="on", decide=decide)

    found = ranks.run([keep(model) for model in models])
    assert found[0].endswith("cannot run a packed row: another rank cannot run it")
    assert found[1].endswith("cannot run a packed row: no such kernel")
    assert ranks.asked == [1, 1]
