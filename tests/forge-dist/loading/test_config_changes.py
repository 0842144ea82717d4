"""What a configuration says that training cannot have is set aside, and an export says it again."""

import json

import pytest
import torch
import transformers

from forge_dist import LoadRequest, check_export, draft_model, export_model, load_model, outline_model, unaligned_experts


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


@pytest.fixture
def youtu(tmp_path):
    """A directory of a Youtu with a padding token and a tied head."""
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    config = transformers.YoutuConfig(
        **sizes, **ranks, num_key_value_heads=2, pad_token_id=3, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    transformers.YoutuForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_a_row_that_transformers_sets_to_zero_is_exported_all_the_same(youtu, tmp_path):
    """Youtu's trained row of the padding token is read back by plain transformers, as the class does not do by itself."""
    model = load_model(str(youtu), dtype=torch.float32, device="cpu")
    assert not model.get_input_embeddings().weight[3].any()
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = 0.5
    # What it guards against: plain transformers writes the row and reads zeros.
    plain = transformers.AutoModelForCausalLM.from_pretrained(youtu)
    with torch.no_grad():
        plain.get_input_embeddings().weight[3] = 0.5
    plain.save_pretrained(tmp_path / "plain")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not read.get_input_embeddings().weight[3].any()
    directory = export_model(model, tmp_path / "out")
    check_export(model, directory, [(list(range(9)), list(range(9)))])
    read = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert (read.get_input_embeddings().weight[3] == 0.5).all()


def test_the_padding_token_stays_where_its_row_is_read(save_base, edit_config):
    """The configurations of all other classes keep their padding token."""
    path = save_base("llama-tied")
    edit_config(path, pad_token_id=3)
    model = load_model(path, dtype=torch.float32, device="cpu")
    assert model.get_input_embeddings().padding_idx == model.config.pad_token_id == 3


IDS = torch.arange(3, 20)[None]


@pytest.fixture
def mixture(tmp_path):
    """A function: write a mixture of experts of a size, and return its directory."""

    def write(size):
        config = transformers.Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=size,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=3,
            num_experts_per_tok=2,
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    ("size", "dtype", "loop"), [(6, torch.float32, True), (8, torch.bfloat16, False), (4, torch.bfloat16, True)]
)
def test_experts_that_no_grouped_product_takes_are_computed_one_after_the_other(mixture, size, dtype, loop):
    """With the numbers of plain transformers' loop; aligned ones stay a grouped product."""
    path = mixture(size)
    model = load_model(path, dtype=dtype, device="cpu")
    assert (unaligned_experts(model) is not None) == loop
    assert model.get_experts_implementation()[""] == ("eager" if loop else "grouped_mm")
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    found = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(found, plain(input_ids=IDS, labels=IDS).loss, rtol=1e-6, atol=0)
    found.backward()
    request = LoadRequest(model_path=path, dtype=dtype, attention="sdpa")
    assert outline_model(request).get_experts_implementation() == model.get_experts_implementation()
    draft_model(request, device="cpu")(input_ids=IDS)
