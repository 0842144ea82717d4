"""Tiny models and byte-level tokenizers of the kinds that GGUF files are made of."""

import json

import torch
import transformers

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0],
}
MODELS = {
    "llama-tied": lambda vocabulary: transformers.LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **SIZES),
    "llama3": lambda vocabulary: transformers.LlamaConfig(
        vocab_size=vocabulary, rope_parameters=LLAMA3_ROPE, head_dim=32, **SIZES
    ),
    "mistral": lambda vocabulary: transformers.MistralConfig(vocab_size=vocabulary, sliding_window=128, **SIZES),
    "qwen2": lambda vocabulary: transformers.Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=True, **SIZES),
    "qwen3": lambda vocabulary: transformers.Qwen3Config(vocab_size=vocabulary, head_dim=32, **SIZES),
    "qwen2_moe": lambda vocabulary: transformers.Qwen2MoeConfig(
        vocab_size=vocabulary, shared_expert_intermediate_size=64, **EXPERTS, **SIZES
    ),
    "granite": lambda vocabulary: transformers.GraniteConfig(
        vocab_size=vocabulary,
        attention_multiplier=0.3,
        embedding_multiplier=3,
        residual_multiplier=0.7,
        logits_scaling=2.0,
        tie_word_embeddings=True,
        **SIZES,
    ),
    "gemma2": lambda vocabulary: transformers.Gemma2Config(
        vocab_size=vocabulary,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=7.0,
        attn_implementation="eager",
        **SIZES,
    ),
    "gemma3": lambda vocabulary: transformers.Gemma3TextConfig(
        vocab_size=vocabulary,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
        **SIZES | {"num_hidden_layers": 7},
    ),
    "gemma3-untied": lambda vocabulary: transformers.Gemma3TextConfig(
        vocab_size=vocabulary,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        tie_word_embeddings=False,
        **SIZES | {"num_hidden_layers": 6},
    ),
    "gpt_oss": lambda vocabulary: transformers.GptOssConfig(
        vocab_size=vocabulary,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        sliding_window=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
        **SIZES,
    ),
    "phi3": lambda vocabulary: transformers.Phi3Config(vocab_size=vocabulary, sliding_window=200, **SIZES),
    "phi3-long": lambda vocabulary: transformers.Phi3Config(
        vocab_size=vocabulary,
        rope_parameters=LONG_ROPE,
        original_max_position_embeddings=256,
        tie_word_embeddings=True,
        **SIZES | {"max_position_embeddings": 512},
    ),
    "smollm3": lambda vocabulary: transformers.SmolLM3Config(vocab_size=vocabulary, **SIZES | {"num_hidden_layers": 5}),
    "olmo2": lambda vocabulary: transformers.Olmo2Config(vocab_size=vocabulary, **SIZES),
    "qwen3_moe": lambda vocabulary: transformers.Qwen3MoeConfig(
        vocab_size=vocabulary, head_dim=32, norm_topk_prob=True, tie_word_embeddings=True, **EXPERTS, **SIZES
    ),
}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor "
    "%}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "def add(first, second):\n    return first + second  # 12345 and 67890",
    "It's what they'll say: naïve cafés, русский текст, 日本語 and more of the same text",
]


def model_of(name, vocabulary=400, seed=0):
    """A model of that kind with random weights, norms and biases included, large enough for logits to see them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(MODELS[name](vocabulary))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tokenizer_of(rule="gpt-2", size=390, begins=False):
    """A byte-level BPE tokenizer that splits text by a rule of `PRE_TOKENIZERS`, with three special tokens and one plain added
    one.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers

    from forge_dist.gguf._tokenizer import PRE_TOKENIZERS, _step

    made = Tokenizer(models.BPE(ignore_merges=PRE_TOKENIZERS[rule].ignore_merges))
    steps = [_step(step) for step in PRE_TOKENIZERS[rule].steps]
    made.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        special_tokens=["<|begin|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT * 3, trainer)
    made.add_tokens([AddedToken("<think>", normalized=False)])
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|begin|>", eos_token="<|im_end|>", pad_token="<|im_start|>"
    )
    fast.chat_template = CHATML
    return fast


def pieces_tokenizer(prefix=False, size=390, metaspace=None):
    """A tokenizer as those of Gemma: sentencepiece's BPE, unknown characters as bytes.

    With `prefix` as Llama 2's own, with `metaspace` as transformers makes that.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<|begin|>", "<|im_end|>", "<|im_start|>"]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("(?=\u2581)"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=size - 258, special_tokens=special, show_progress=False)
    trained.train_from_iterator([*TEXT * 3, "a  b   c    d"], trainer)
    learned = json.loads(trained.to_str())["model"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *(t for t in learned["vocab"] if t not in special)]
    merges = [tuple(merge) for merge in learned["merges"]]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    if metaspace is None:
        made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=False)
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("\n\n", normalized=False)])
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|begin|>", eos_token="<|im_end|>", pad_token="<|im_start|>"
    )
    fast.chat_template = CHATML
    return fast


def phi3_tokenizer(strips=True):
    """A tokenizer as Phi-3's: pieces after a space; with `strips` white space behind most of its added tokens is no text."""
    fast = pieces_tokenizer(prefix=True, size=380)
    fast.add_special_tokens(
        {"extra_special_tokens": ["<unk>", "<s>", "<|endoftext|>", "</s>", "<|user|>", "<|end|>", "<|assistant|>"]}
    )
    backend = json.loads(fast.backend_tokenizer.to_str()) | {"post_processor": None}
    for token in backend["added_tokens"]:
        token["rstrip"] = strips and token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    made = fast.backend_tokenizer.from_str(json.dumps(backend))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<|endoftext|>")
    fast.chat_template = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    return fast
