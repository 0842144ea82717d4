"""Tiny models, packed rows, and naive losses.
One unpadded sample at a time, full logits, torch's own cross entropy.
"""

from types import SimpleNamespace

import numpy as np
import torch
import transformers

CPU = torch.device("cpu")
VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = ("llama-tied", "llama-untied", "qwen3", "gemma2", "gemma3", "granite", "cohere")


def make(architecture="llama-tied", *, seed=0, attention=None, size=0.2):
    """Return a causal language model of ~5,000 random weights, in training mode.
    They are large enough to change the loss.
    """
    kind = architecture.partition("-")[0]
    prefix = {
        "llama": "Llama",
        "qwen3": "Qwen3",
        "gemma2": "Gemma2",
        "gemma3": "Gemma3",
        "granite": "Granite",
        "cohere": "Cohere",
    }[kind]
    extra = {
        "llama": {"tie_word_embeddings": architecture == "llama-tied"},
        "qwen3": {"head_dim": 4, "tie_word_embeddings": False},
        "gemma2": {"head_dim": 4, "sliding_window": 4, "final_logit_softcapping": 3.0, "attn_logit_softcapping": None},
        "gemma3": {"head_dim": 4, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "granite": {"logits_scaling": 8.0},
        "cohere": {"logit_scale": 0.25},
    }[kind]
    config = getattr(transformers, prefix + ("TextConfig" if kind == "gemma3" else "Config"))(**SIZES, **extra)
    # transformers has no sdpa for Gemma 2.
    config._attn_implementation = attention or ("eager" if kind == "gemma2" else "sdpa")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * size)
    return model.train()


def samples(lengths, *, seed=0, learned=0.6):
    """Return (input_ids, labels) of each length, a share of the labels learned.
    The first token's too.
    """
    random = np.random.default_rng(seed)
    found = []
    for length in lengths:
        ids = random.integers(3, VOCAB, length)
        found.append((ids, np.where(random.random(length) < learned, ids, -100)))
    return found


def pack(examples):
    """Return one packed row of (input_ids, labels).
    Labels are kept as they are, so that a first token's may be set.
    """
    lengths = [len(ids) for ids, _ in examples]
    none = [np.zeros(0, dtype=np.int64)]
    return SimpleNamespace(
        input_ids=np.concatenate([*none, *(ids for ids, _ in examples)]),
        labels=np.concatenate([*none, *(labels for _, labels in examples)]),
        position_ids=np.concatenate([*none, *(np.arange(n) for n in lengths)]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        max_seqlen=max(lengths, default=0),
    )


def naive(model, examples):
    """Return (summed loss, learned tokens), one sample at a time; gradients flow."""
    total, count = torch.zeros(()), 0
    for ids, labels in examples:
        logits = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0, :-1].float()
        targets = torch.tensor(labels)[1:]
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        count += int((targets != -100).sum())
    return total, count


def gradients(model):
    """Return name → gradient of every parameter that has one, in a copy."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(ours, theirs):
    """Return ‖ours - theirs‖ / ‖theirs‖ over all parameters."""
    assert ours.keys() == theirs.keys()
    difference = sum((ours[n].double() - theirs[n].double()).square().sum() for n in theirs)
    return float((difference / sum(theirs[n].double().square().sum() for n in theirs)).sqrt())


def worst(ours, theirs):
    """Return the largest relative distance of any one parameter's gradient.
    Relative to its norm plus a thousandth of the whole gradient's norm.
    """
    assert ours.keys() == theirs.keys()
    whole = float(sum(g.double().square().sum() for g in theirs.values())) ** 0.5
    return max(float((ours[n] - theirs[n]).norm()) / max(float(theirs[n].norm()), 1e-3 * whole) for n in theirs)


def assert_other_calls_are_equal(model, plain):
    """A padded batch under a mask and a cache, and a generation, are those of `plain` to the bit."""
    ids = torch.arange(3, 15).view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
    assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
