"""Documents in lines before which virtual tokens stand are compared with plain PEFT."""

import pytest
import torch
import transformers

from forge_algos import SFT, AdapterError, AdapterSettings, PackedBatchError, adapt, keep_documents_apart, repeated_blocks
from forge_algos.heads._packable import require_packable
from forge_algos.isolation import _compare

from ..isolation.test_by_layers import deep
from ..oracle import CPU, make, naive, pack, samples


def adapted(adapter):
    """Return a model of many layers in bfloat16 with virtual tokens."""
    return adapt(deep("llama"), AdapterSettings(adapter=adapter, num_virtual_tokens=3)).model


@pytest.mark.parametrize("adapter", ["prefix", "prompt"])
def test_rounding_of_many_layers_is_no_difference(adapter, monkeypatch):
    """Lines pass layer by layer where rounding has grown too far for the whole model's bound."""
    answers, compare = [], _compare.apart_by_layers
    monkeypatch.setattr(
        _compare, "apart_by_layers", lambda *args, **rest: answers.append(compare(*args, **rest)) or answers[-1]
    )
    require_packable(adapted(adapter), device=CPU)
    assert answers
    assert all(answers)


@pytest.mark.parametrize("adapter", ["prefix", "prompt"])
def test_lines_that_mix_are_found_beside_rounding(adapter):
    """A layer that gives one line a tenth of another is found."""
    model = adapted(adapter)
    layer = model.get_base_model().model.layers[20]
    layer.register_forward_hook(lambda _module, args, output: output + 0.1 * (args[0].roll(1, 0) - args[0]))
    with pytest.raises(AdapterError, match="of two documents comes out otherwise than alone"):
        require_packable(model, device=CPU)


def test_a_model_that_mixes_documents_is_answered_with_what_runs_them_alone():
    """The refusal names `keep_documents_apart`, after which the loss is that of one document at a time."""
    documents = samples([5, 3])
    config = transformers.BloomConfig(
        vocab_size=61, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0
    )
    model, objective = transformers.BloomForCausalLM(config), SFT()
    with pytest.raises(PackedBatchError, match=r"call forge_algos.keep_documents_apart\(model, device=...\) first"):
        objective.bind(model, device=CPU)
    packed, _ = keep_documents_apart(model, device=CPU)
    loss, _ = naive(model, documents)
    assert not packed
    torch.testing.assert_close(objective.bind(model, device=CPU)(pack(documents), []).sum, loss, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at activations
def test_a_model_compiled_as_a_whole_is_answered_with_its_layers():
    """`torch.compile(model)` is refused by name; compiled layers give the loss of plain ones."""
    batch, objective = pack(samples([5, 3])), SFT()
    with pytest.raises(PackedBatchError, match=r"repeated_blocks\(model\): block.compile\(\)"):
        objective.bind(torch.compile(make(), backend="eager"), device=CPU)
    plain, compiled = make(), make()
    for block in repeated_blocks(compiled):
        block.compile(backend="eager")
    one, other = (objective.bind(model, device=CPU)(batch, []).sum for model in (plain, compiled))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
