"""Sharded on read, every tensor of it, without changing a bit; models that cannot be divided rightly are refused."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from ....lanes import ci_keeps
from ....ranks import run_on_ranks
from ...training import start

LONG = {"n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 61, "n_positions": 64}


def loaded(ranks, paths, options, bfloat16=()):
    """(bytes here, bytes of all, names of groups, whole tensors on rank 0)"""
    import torch

    from forge_dist.strategies._wrappers import fsdp_modules

    found = []
    for path in paths:
        strategy, model, _ = start(ranks, path, options, dtype=torch.bfloat16 if path in bfloat16 else None)
        here = sum(p.to_local().numel() for p in model.parameters())
        groups = [type(module).__name__ for module in fsdp_modules(model)]
        found.append((here, sum(p.numel() for p in model.parameters()), groups, dict(strategy.whole(model))))
    return found


@pytest.fixture
def gpt2(tmp_path):
    """A model whose layers are not called `layers`, with tied weights."""
    import transformers

    transformers.GPT2LMHeadModel(transformers.GPT2Config(**LONG)).save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", ci_keeps([3], [2, 3]))
def test_shards_on_read(world_size, save_base, gpt2):
    """Each rank holds about its part of every weight, and the parts put together are the file's, bit for bit, in its own
    order.
    """
    import torch
    import transformers

    paths = [save_base(kind, name=kind) for kind in ("llama-tied", "llama-untied", "qwen3", "gemma3")]
    half = save_base("gemma3", dtype=torch.bfloat16, name="half")
    ranks = run_on_ranks(loaded, world_size, [*paths, gpt2, half], {"strategy": "fsdp2"}, [half])
    for number, path in enumerate([*paths, gpt2, half]):
        of_all = ranks[0][number][1]
        assert sum(rank[number][0] for rank in ranks) == of_all
        assert all(abs(rank[number][0] - of_all / world_size) < 0.1 * of_all for rank in ranks)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        wanted, seen = {}, set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                wanted[name] = tensor
                seen.add(id(tensor))
        whole = ranks[0][number][3]
        assert list(whole) == list(wanted)
        assert all(torch.equal(whole[name], tensor) and whole[name].dtype == tensor.dtype for name, tensor in wanted.items())
        assert all(set(rank[number][3].values()) == {None} for rank in ranks[1:])


@pytest.mark.slow
def test_layers_are_groups(gpt2):
    """Each layer is put together by itself, also where transformers' plan does not know its name."""
    (_, _, groups, _), *_ = run_on_ranks(loaded, 2, [gpt2], {"strategy": "fsdp2"})[0]
    assert groups.count("FSDPGPT2Block") == LONG["n_layer"]


def refusals(ranks, paths):
    import torch

    import forge_dist

    settings = forge_dist.StrategySettings(strategy="fsdp2")
    strategy = forge_dist.make_strategy(settings, ranks, device=torch.device("cpu"), adapter=False)
    messages = []
    for path in paths:
        try:
            strategy.load(path, dtype=torch.float32)
        except forge_dist.ForgeDistError as error:
            messages.append((type(error).__name__, str(error)))
    return messages


@pytest.fixture
def kimi(tmp_path):
    """A model whose convolution of queries, keys and values is three tensors of its files."""
    import transformers

    config = transformers.KimiLinearConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        linear_head_dim=8,
        linear_num_heads=2,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    transformers.KimiLinearForCausalLM(config).save_pretrained(tmp_path / "kimi")
    return str(tmp_path / "kimi")


@pytest.fixture
def falcon_h1(tmp_path):
    """Path of a tiny Falcon-H1, whose factors are in a buffer that no file holds."""
    import transformers

    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    mamba = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    config = transformers.FalconH1Config(
        **shape, **mamba, num_key_value_heads=2, pad_token_id=0, ssm_multipliers=[1.5, 0.5, 2.0, 0.25, 3.0]
    )
    transformers.FalconH1ForCausalLM(config).save_pretrained(tmp_path / "falcon_h1")
    return str(tmp_path / "falcon_h1")


@pytest.fixture
def zamba(tmp_path):
    """Path of a tiny Zamba, two of whose layers share a block of attention."""
    import transformers

    config = transformers.ZambaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        layers_block_type=["hybrid", "linear_attention", "hybrid"],
        num_attention_heads=2,
        num_key_value_heads=2,
        n_mamba_heads=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        pad_token_id=0,
    )
    transformers.ZambaForCausalLM(config).save_pretrained(tmp_path / "zamba")
    return str(tmp_path / "zamba")


IDS = [[5, 6, 7, 8, 9, 10, 11]]


def computed(ranks, paths):
    """(logits of each model, names of its groups), after a forward and a backward."""
    import torch

    from forge_dist.strategies._wrappers import fsdp_modules

    found = []
    for path in paths:
        _, model, _ = start(ranks, path, {"strategy": "fsdp2"})
        logits = model(input_ids=torch.tensor(IDS), use_cache=False).logits
        logits.sum().backward()
        found.append((logits.detach(), [type(module).__name__ for module in fsdp_modules(model)]))
    return found


@pytest.fixture
def hrm(tmp_path):
    """Path of a tiny HRM, whose queries, keys, values and gates are one tensor of its files."""
    import transformers

    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.HrmTextConfig(**shape, num_layers_per_stack=1, head_dim=8, pad_token_id=0)
    transformers.HrmTextForCausalLM(config).save_pretrained(tmp_path / "hrm")
    return str(tmp_path / "hrm")


@pytest.fixture
def lara(tmp_path):
    """Path of a tiny LARA Mini, whose projections transformers 5.24 cuts from one tensor of the files; none before it."""
    import transformers

    if not hasattr(transformers, "LaraMiniConfig"):
        return []
    shape = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    linear = {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = transformers.LaraMiniConfig(**shape, **experts, **linear, **layers, pad_token_id=0, eos_token_id=1)
    transformers.LaraMiniForCausalLM(config).save_pretrained(tmp_path / "lara")
    return [str(tmp_path / "lara")]


@pytest.mark.slow
# On three ranks shards are of unlike shapes too.
@pytest.mark.parametrize("world_size", ci_keeps([3], [2, 3]))
def test_what_transformers_divides_wrongly_computes_as_in_one_process(world_size, falcon_h1, zamba, kimi, hrm, lara):
    """Falcon-H1's factors, which transformers leaves unset in shards; Zamba's shared block, which it puts into the groups of
    both layers: it is in the root's, and what else those layers have is in groups of its own; Kimi-Linear's convolutions and
    HRM's projections, which it puts together from wrong shards, of the same shape or (on three ranks) of another; what it cuts
    from a tensor of the files, of which a shard is too short.
    """
    import torch
    import transformers

    paths = [falcon_h1, zamba, kimi, hrm, *lara]
    for rank in run_on_ranks(computed, world_size, paths):
        for path, (logits, _) in zip(paths, rank, strict=True):
            plain = transformers.AutoModelForCausalLM.from_pretrained(path)
            with torch.no_grad():
                torch.testing.assert_close(logits, plain(input_ids=torch.tensor(IDS), use_cache=False).logits)
        groups = rank[1][1]
        assert groups.count("FSDPZambaMambaDecoderLayer") == 3
        assert not {"FSDPZambaHybridLayer", "FSDPZambaAttentionDecoderLayer"} & set(groups)
    paths = [kimi, hrm, *lara]
    for number, (_, _, _, whole) in enumerate(run_on_ranks(loaded, world_size, paths, {"strategy": "fsdp2"})[0]):
        plain = transformers.AutoModelForCausalLM.from_pretrained(paths[number]).state_dict()
        assert all(torch.equal(tensor, plain[name]) for name, tensor in whole.items())


@pytest.mark.slow
def test_refusals(save_base, edit_config):
    """Missing and misshapen weights are ModelErrors as in one process; a weight tied in the config but not in the files is
    refused.
    """
    untied = save_base("llama-untied", name="untied")
    edit_config(untied, tie_word_embeddings=True)
    short = save_base("llama-tied", name="short")
    edit_config(short, num_hidden_layers=3)
    wide = save_base("llama-tied", name="wide")
    edit_config(wide, vocab_size=67)
    missing, shape, tied = run_on_ranks(refusals, 2, [short, wide, untied])[1]
    assert missing[0] == "ModelError"
    assert "lacks weight model.layers.2" in missing[1]
    assert shape[0] == "ModelError"
    assert "another shape of weight model.embed_tokens.weight" in shape[1]
    assert tied[0] == "StrategyError"
    assert "ties lm_head.weight" in tied[1]


@pytest.mark.slow
def test_files_that_lack_a_piece_of_a_weight_are_refused(kimi, hrm, lara):
    """A weight that is read again is made of all that it has in one process, and else refused: it came out cut or too short."""
    from safetensors.torch import load_file, save_file

    paths, pieces = [kimi, hrm, *lara], ("k_conv1d", "gqkv_proj", "in_proj.weight")
    for path, piece in zip(paths, pieces, strict=False):
        file = Path(path) / "model.safetensors"
        tensors = load_file(file)
        name = next(name for name in tensors if piece in name)
        whole = tensors.pop(name)
        if path != kimi:
            tensors[name] = whole[:-2].clone()
        save_file(tensors, file, metadata={"format": "pt"})
    for found in run_on_ranks(refusals, 2, paths):
        assert [kind for kind, _ in found] == ["ModelError"] * len(paths)
        assert "another shape of weight model.layers.0.self_attn.conv1d.weight" in found[0][1]
        assert "another shape of weight" in found[1][1]
        assert all("in_proj_qkv.weight cannot be put together" in text for _, text in found[2:])


@pytest.mark.parametrize(("there", "refused"), [(False, False), (True, True)])
def test_a_build_for_gpus_without_one_shards_on_the_cpu(there, refused, monkeypatch):
    """PyPI's torch is built for GPUs: where there is none, fsdp2 divides over CPUs; where there is one, it wants that."""
    import torch

    from forge_dist import LaunchSettings, Ranks, StrategyError, StrategySettings, topology
    from forge_dist.strategies.fsdp._strategy import FSDP

    gpu = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available and not there else gpu,
    )
    ranks = Ranks(topology(LaunchSettings(), environ={}))
    how = {"device": torch.device("cpu"), "name": "fsdp2", "reason": "asked for", "adapter": False}
    with pytest.raises(StrategyError, match="shards onto the machine's cuda") if refused else nullcontext():
        FSDP(StrategySettings(strategy="fsdp2"), ranks, **how)


def test_saved_class(save_base):
    """The class keeps its name, by which a saved config.json tells what the model is."""
    from transformers import AutoConfig

    from forge_dist.loading._fsdp_groups import shardable_class

    path = save_base("qwen3")
    kind = shardable_class(AutoConfig.from_pretrained(path))
    assert [kind.__name__] == json.loads((Path(path) / "config.json").read_text())["architectures"]
