"""Tiny models and a tiny tokenizer, made on the spot. Imports no torch by itself."""

import json
from pathlib import Path

import pytest

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
ARCHITECTURES = ("llama-tied", "llama-untied", "qwen3", "gemma3")
SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make(architecture, seed=0):
    """A causal language model of ~5,000 random weights that are large enough for a loss to see them."""
    import torch
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if architecture == "qwen3":
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=4, tie_word_embeddings=False, **SIZES))
        elif architecture == "gemma3":
            config = transformers.Gemma3TextConfig(
                head_dim=4, sliding_window=4, layer_types=["sliding_attention", "full_attention"], **SIZES
            )
            model = transformers.Gemma3ForCausalLM(config)
        else:
            config = transformers.LlamaConfig(tie_word_embeddings=architecture == "llama-tied", rope_theta=500.0, **SIZES)
            model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.fixture(scope="session")
def make_model():
    """`make_model(architecture)`: a fresh random model in memory."""
    return make


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    """Each architecture in turn."""
    return request.param


@pytest.fixture
def save_base(tmp_path):
    """`save_base(architecture, dtype=None)`: such a model as transformers itself writes it, and the path of its directory."""

    def save(architecture="llama-tied", dtype=None, name="base"):
        directory = tmp_path / name
        model = make(architecture)
        (model if dtype is None else model.to(dtype)).save_pretrained(directory)
        return str(directory)

    return save


@pytest.fixture
def base(save_base):
    """Path of a tiny Llama with tied embeddings, in float32."""
    return save_base()


@pytest.fixture(scope="session")
def tokenizer():
    """A whole-word tokenizer of five tokens, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3, "b": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def samples():
    """Three samples of odd lengths; masks that do, and do not, start with -100; one of two tokens."""
    return [
        ([5, 6, 7, 8, 9, 10, 11], [-100, -100, 7, 8, -100, 10, 11]),
        ([3, 60, 2, 59, 1, 58, 0, 57, 33, 21, 20], [3, 60, 2, 59, 1, 58, 0, 57, 33, 21, 20]),
        ([42, 17], [-100, 17]),
    ]


@pytest.fixture(scope="session")
def documents():
    """An attention function as forge_accel hands one over: causal, over one document, with no mask."""
    import torch

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        assert attention_mask is None
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    return attend


@pytest.fixture
def edit_config():
    """`edit_config(directory, key=value)`: change a config.json; a value of None takes the key out."""

    def edit(directory, **changes):
        file = Path(directory) / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return edit


@pytest.fixture
def state_of():
    """`state_of(model)`: a copy of its tensors, for a comparison later on."""
    return lambda model: {name: tensor.clone() for name, tensor in model.state_dict().items()}
