"""What a configuration says that training cannot have is set aside, and an export says it again."""

import json

import pytest
import torch
import transformers

from forge_dist import check_export, export_model, load_model


@pytest.fixture
def rwkv(tmp_path):
    """A directory of an RWKV that halves the weights of its third layer in evaluation mode."""
    torch.manual_seed(0)
    config = transformers.RwkvConfig(
        vocab_size=61, hidden_size=16, attention_hidden_size=16, num_hidden_layers=3, rescale_every=2, return_dict=False
    )
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_an_export_has_the_weights_and_the_configuration_that_were_read(rwkv, tmp_path):
    """Evaluating halves no weights; outputs have names; the export is the directory that was read."""
    model = load_model(str(rwkv), dtype=torch.float32, device="cpu", attention="eager")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(7)[None]
    with torch.no_grad():
        found = model.eval()(ids, use_cache=False).logits
        plain = transformers.AutoModelForCausalLM.from_pretrained(rwkv).eval()
        # Halved states differ by a layer norm's epsilon.
        assert torch.allclose(found, plain(ids, use_cache=False)[0], atol=1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    # What it guards against: plain transformers changed its own.
    assert not torch.equal(
        plain.state_dict()["rwkv.blocks.2.attention.output.weight"], before["rwkv.blocks.2.attention.output.weight"]
    )
    directory = export_model(model, tmp_path / "out")
    assert check_export(model, directory, [(list(range(9)), list(range(9)))]).tensors == len(before)
    for name in ("rescale_every", "return_dict"):
        stored = [json.loads((folder / "config.json").read_text()).get(name) for folder in (rwkv, directory)]
        assert stored[0] == stored[1]
    assert transformers.AutoConfig.from_pretrained(directory).rescale_every == 2
