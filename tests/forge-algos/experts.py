"""Tiny mixtures of experts of families that keep expert matrices, routers and dense layers differently."""

import torch
import transformers

from .oracle import SIZES

E = 4
_FOUR = {"num_experts_per_tok": 2}
FAMILIES = {
    # [E, outputs, inputs] in files one by one.
    "qwen3_moe": {"num_experts": E, "moe_intermediate_size": 12, "decoder_sparse_step": 1, "head_dim": 4, **_FOUR},
    "mixtral": {"num_local_experts": E, "sliding_window": None, **_FOUR},
    "olmoe": {"num_experts": E, **_FOUR},
    "granitemoe": {"num_local_experts": E, **_FOUR},
    # [E, inputs, outputs], with biases, gate and up interleaved.
    "gpt_oss": {"num_local_experts": E, "head_dim": 4, "rope_parameters": {"rope_type": "default"}, **_FOUR},
    # [E, inputs, outputs]; a router that is a subclass of nn.Linear and returns two tensors.
    "llama4_text": {
        "num_local_experts": E,
        "num_experts_per_tok": 1,
        "head_dim": 4,
        "intermediate_size_mlp": 20,
        "attention_chunk_size": 32,
    },
    # A dense layer, and experts beside which lies a shared one with the names that experts had in older versions.
    "deepseek_v3": {
        "n_routed_experts": E,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 8,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        **_FOUR,
    },
    # A router that is a subclass of nn.Linear too.
    "phimoe": {"num_local_experts": E, **_FOUR},
    # Stacks that are called `weight`, of the attention too.
    "jetmoe": {"num_local_experts": E, "kv_channels": 8, **_FOUR},
}


def mixture(family="qwen3_moe", *, seed=0, **changes):
    """Return a mixture of experts with random weights that are large enough to matter."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return model.train()


class Experts(torch.nn.Module):
    """The experts of Qwen3-MoE as linear layers, one by one."""

    def __init__(self, stacks):
        super().__init__()
        pairs = list(zip(stacks.gate_up_proj.detach(), stacks.down_proj.detach(), strict=True))
        self.up, self.down = (torch.nn.ModuleList(_linear(pair[i]) for pair in pairs) for i in (0, 1))

    def forward(self, x, top_k_index, top_k_weights):
        total = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            tokens, places = torch.where(top_k_index == e)
            gate, inner = up(x[tokens]).chunk(2, dim=-1)
            found = down(torch.nn.functional.silu(gate) * inner) * top_k_weights[tokens, places, None]
            total = total.index_add(0, tokens, found)
        return total


def with_linear_experts(model):
    """Put linear layers into the places of a Qwen3-MoE's stacks: the same function, an oracle for stacks."""
    for layer in model.model.layers:
        layer.mlp.experts = Experts(layer.mlp.experts)
    return model


def stack_of(model, layer, key):
    """Return the matrices of the linear experts of a layer as a stack [E, N, M]."""
    linear = getattr(model.model.layers[layer].mlp.experts, {"gate_up_proj": "up", "down_proj": "down"}[key])
    return torch.stack([one.weight for one in linear])


def _linear(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer
