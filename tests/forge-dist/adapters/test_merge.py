"""Adapters into the weights of their base, proved by logits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, ZambaConfig

from forge_dist import ExportError, ModelError, check_export, export_model, load_model, load_trained, merge_adapter

from ...whole import modalities

peft = pytest.importorskip("peft", reason="peft is an extra of forge-dist: pip install 'forge-dist[peft]'")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning", "ignore:Model has `tie_word_embeddings=True`:UserWarning"
)

ROWS = [[5, 6, 7, 8, 9, 10, 11], [3, 60, 2, 59, 1, 58, 0, 57, 33, 21, 20], [42, 17]]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MERGEABLE = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.5, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "rslora": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "loha": lambda: peft.LoHaConfig(r=4, alpha=8, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "lokr": lambda: peft.LoKrConfig(r=2, alpha=8, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "miss": lambda: peft.MissConfig(r=5, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "vera": lambda: peft.VeraConfig(r=8, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "randlora": lambda: peft.RandLoraConfig(r=4, randlora_alpha=8, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "c3a": lambda: peft.C3AConfig(block_size=8, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
}


@pytest.fixture
def adapter(save_base, tmp_path):
    """`adapter(config, architecture)`: the directory of an adapter that was trained a little."""

    def write(config, architecture="llama-tied", quantization=None, base=None):
        base = base or save_base(architecture)
        torch.manual_seed(3)
        model = load_model(base, dtype=torch.float32, device="cpu", quantization=quantization)
        model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        return export_model(model, tmp_path / "adapter")

    return write


@pytest.fixture
def adapter_of_zamba(adapter, tmp_path):
    """`adapter_of_zamba(targets)`: of LoRA on a model of which two layers have one transformer block."""
    kinds = ["hybrid", "linear_attention", "hybrid"]
    config = ZambaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_head_dim=8,
        mamba_d_state=4,
        mamba_expand=2,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        layers_block_type=kinds,
    )

    def write(targets):
        torch.manual_seed(0)
        base = tmp_path / "zamba"
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
        return adapter(peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"), base=str(base))

    return write


def logits(model):
    """Of every row, float32."""
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits for row in ROWS]


def apart(first, second):
    """Largest difference of two lists of logits, relative to the largest logit."""
    largest = max(one.abs().max().item() for one in first)
    return max((one - other).abs().max().item() for one, other in zip(first, second, strict=True)) / largest


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [*((kind, "llama-tied") for kind in MERGEABLE), ("lora", "llama-untied"), ("dora", "qwen3"), ("lora", "gemma3")],
)
def test_a_merged_model_computes_what_the_adapter_does(adapter, kind, architecture):
    """Its logits are those beside the base within 1e-5, and far from the base's own; what is reported is what is found."""
    directory = adapter(MERGEABLE[kind](), architecture)
    beside = logits(load_trained(str(directory), dtype=torch.float32, device="cpu"))
    told = []
    found = merge_adapter(directory, ROWS, doing=told.append)
    assert told == ["merging the adapter into its base, and comparing the logits"]
    assert not any("lora" in name or "ia3" in name for name, _ in found.model.named_modules())
    assert not found.model.training
    assert found.tokens == 20
    assert apart(beside, logits(found.model)) == pytest.approx(found.difference, abs=1e-9)
    assert found.difference <= 1e-5
    base = json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert apart(beside, logits(load_model(base, dtype=torch.float32, device="cpu"))) > 1e-2


def test_a_merged_model_is_exported_with_tied_weights_once(adapter, tmp_path):
    """The embedding stays tied: one tensor in the files, one in the model that plain transformers reads, proved like any
    export.
    """
    found = merge_adapter(adapter(MERGEABLE["lora"]()), ROWS)
    directory = export_model(found.model, tmp_path / "merged", dtype=torch.bfloat16)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    check_export(found.model, directory, [(row, row) for row in ROWS])
    back = load_model(str(directory), dtype=torch.float32, device="cpu")
    assert back.lm_head.weight is back.model.embed_tokens.weight


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_tied_weights_is_refused(adapter, target):
    """One weight cannot become two: the layer is named. Where they are two weights, it is merged."""
    config = peft.LoraConfig(r=2, target_modules=[target], task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match=r"adapts the (head|embedding), which shares its weight"):
        merge_adapter(adapter(config), ROWS)


def test_an_adapter_on_the_head_of_an_untied_model_is_merged(adapter):
    """The refusal is of tied weights alone."""
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    assert merge_adapter(adapter(config, "llama-untied"), ROWS).difference <= 1e-5


@pytest.fixture
def of_peft(save_base, tmp_path):
    """`of_peft(**options)`: the directory of a LoRA that plain PEFT wrote."""

    def write(**options):
        base = load_model(save_base("llama-untied"), dtype=torch.float32, device="cpu")
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **options})
        peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return write


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning")
def test_the_weight_of_a_head_beside_its_factors_is_read(of_peft):
    """PEFT writes it with the adapter, and reads it into the base."""
    directory = of_peft(target_modules=["lm_head"], init_lora_weights=False)
    assert "base_model.model.lm_head.base_layer.weight" in load_file(directory / "adapter_model.safetensors")
    assert merge_adapter(directory, ROWS).difference <= 1e-5


def test_embeddings_beside_an_adapter_are_read(save_base, tmp_path):
    """As plain PEFT reads them into the base (save_embedding_layers); of another vocabulary, what to do is said."""
    model = load_model(save_base("llama-untied"), dtype=torch.float32, device="cpu")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    merged = merge_adapter(tmp_path / "adapter", ROWS)
    assert merged.difference <= 1e-5
    assert torch.equal(merged.model.get_input_embeddings().weight, model.get_input_embeddings().weight)
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows + 3)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    with pytest.raises(ModelError, match=rf"{rows + 3} rows and its base {rows}: .*resize_token_embeddings\({rows + 3}\)"):
        merge_adapter(tmp_path / "adapter", ROWS)


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed:UserWarning", "ignore:.*have invalid shape:UserWarning")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_bias": True}, "cannot be merged: .*because the base layer has no bias; use the adapter beside its base"),
        ({"alora_invocation_tokens": [5, 6]}, "cannot be merged: aLoRA does not support safe merging; use the adapter beside"),
        ({"init_lora_weights": "pissa_niter_2"}, "a random approximation, which PEFT would draw anew: write it with"),
    ],
)
def test_what_no_weight_can_hold_is_refused(options, message, of_peft):
    """And what PEFT would read otherwise than it was written."""
    with pytest.raises(ModelError, match=message):
        merge_adapter(of_peft(**options), ROWS)


@pytest.mark.parametrize("targets", [["q_proj"], ["layers.0.shared_transf.self_attn.q_proj"]])
def test_an_adapter_on_a_weight_of_several_layers_is_refused(targets, adapter_of_zamba):
    """Zamba's blocks are one: what one adapter adds would change the layers of the other. Both names are given."""
    directory = adapter_of_zamba(targets)
    block = r"model\.layers\.\d\.shared_transf\.self_attn\.q_proj\.weight"
    with pytest.raises(ModelError, match=rf"it adapts {block}, which is one weight with {block} \(1 such weights\)"):
        merge_adapter(directory, ROWS)


def test_layers_beside_shared_ones_are_merged(adapter_of_zamba):
    """Zamba's other layers have weights of their own."""
    assert merge_adapter(adapter_of_zamba(["linear"]), ROWS).difference <= 1e-5


@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM"),
    ],
)
def test_virtual_tokens_are_refused(adapter, config):
    """They change no weight; the way out is named."""
    with pytest.raises(ModelError, match="changes no weight; use the adapter beside its base"):
        merge_adapter(adapter(config(), "llama-untied"), ROWS)


def test_an_adapter_of_another_base_is_refused(adapter, save_base):
    """A base whose weights changed since is not the one that the adapter was trained beside."""
    directory = adapter(MERGEABLE["lora"]())
    base = json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"]
    tensors = load_file(f"{base}/model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 0.1
    save_file(tensors, f"{base}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="another base model"):
        merge_adapter(directory, ROWS)


def test_a_merge_that_went_wrong_is_found(adapter, monkeypatch):
    """Logits that differ end it, with the figure: here PEFT merges nothing."""
    directory = adapter(MERGEABLE["lora"]())
    monkeypatch.setattr(peft.tuners.lora.LoraModel, "merge_and_unload", lambda self, **_: self.unload())
    with pytest.raises(ExportError, match="computes other logits than beside it"):
        merge_adapter(directory, ROWS)


def test_what_is_no_adapter_is_refused(base):
    """A whole model has nothing to merge."""
    with pytest.raises(ModelError, match="no adapter that can be merged"):
        merge_adapter(base, ROWS)


@pytest.mark.parametrize(
    "how",
    [
        *({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": t} for t in ("float32", "bfloat16")),
        {"load_in_8bit": True},
    ],
)
def test_an_adapter_beside_codes_is_merged_into_what_they_stand_for(adapter, how):
    """The merged model is the one that was trained, on the rounded base, and not the adapter on weights that it never saw."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    from transformers import BitsAndBytesConfig

    directory = adapter(MERGEABLE["lora"](), quantization=BitsAndBytesConfig(**how))
    found = merge_adapter(directory, ROWS)
    assert found.difference <= 1e-5
    assert {parameter.dtype for parameter in found.model.parameters()} == {torch.float32}
    assert not hasattr(found.model.config, "quantization_config")
    unrounded = load_trained(str(directory), dtype=torch.float32, device="cpu")
    assert apart(logits(found.model), logits(unrounded)) > (1e-3 if "load_in_4bit" in how else 1e-4)


@pytest.mark.parametrize("how", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_gpt2_beside_codes_is_merged_into_its_own_layers(adapter, how, tmp_path):
    """Quantization makes linear layers of Conv1D, whose weights are the other way round."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=61, **shape)).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM")
    directory = adapter(config, quantization=BitsAndBytesConfig(**how), base=str(tmp_path / "base"))
    found = merge_adapter(directory, ROWS).model
    assert found.transformer.h[0].attn.c_attn.weight.shape == (16, 48)
    found.save_pretrained(tmp_path / "merged")
    assert apart(logits(found), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval())) < 1e-6


def test_layers_that_no_text_reaches_are_compared_by_themselves(adapter, tmp_path, monkeypatch):
    """A vision tower's: what is merged wrongly there changes no logit of text, and is found and named."""
    base = tmp_path / "base"
    config = modalities.CONFIGS["gemma3"]()
    torch.manual_seed(0)
    AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    directory = adapter(peft.LoraConfig(r=2, target_modules=["fc1", "q_proj"]), base=str(base))
    assert merge_adapter(directory, ROWS).apart == 3
    tuner = peft.tuners.lora.LoraModel
    rightly = tuner.merge_and_unload

    def wrongly(self, **how):
        found = rightly(self, **how)
        next(weight for name, weight in found.named_parameters() if name.endswith("fc1.weight")).data *= 1.01
        return found

    monkeypatch.setattr(tuner, "merge_and_unload", wrongly)
    with pytest.raises(ExportError, match=r"vision_tower\.\S+\.fc1 computes something else than beside it: on random inputs"):
        merge_adapter(directory, ROWS)
