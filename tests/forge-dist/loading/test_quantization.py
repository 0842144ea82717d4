"""A base in 4 or 8 bits under an adapter: read, trained, divided, exported and proved."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from forge_dist import (
    ExportError,
    LoadRequest,
    ModelError,
    StrategyError,
    adapter_base,
    check_export,
    export_model,
    load_model,
    load_trained,
)
from forge_dist.loading._outline import outline_model
from forge_dist.loading._quantization import int8_layers

from ...ranks import run_on_ranks
from ..divided import SAMPLES, strategy_of, zero
from ..training import Kept, alone, gradients, train

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "accelerate", "peft")),
        reason="needs the extras bitsandbytes (which brings accelerate) and peft",
    ),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def nf4(double_quant=True):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )


def int8():
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama whose matrices are large enough for several blocks of 64 weights, and of sizes that two ranks divide unevenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=61,
            hidden_size=48,
            intermediate_size=36,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        folder = tmp_path_factory.mktemp("quantized")
        LlamaForCausalLM(config).save_pretrained(folder / "base")
    return str(folder / "base")


def adapted(model):
    """LoRA on every linear layer, with weights that are not zero and follow from a seed."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(5)
        return get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2, init_lora_weights=False)
        )


def start(strategy, base, kept=None, bits=nf4):
    model = strategy.load(base, dtype=torch.float32, quantization=bits())
    strategy.settle(model)
    model, optimizer = strategy.wrap(
        adapted(model), lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
    )
    if kept is not None:
        strategy.load_state(model, optimizer, kept)
    return model.train(), optimizer


def frozen(strategy, model):
    return {key: tensor.clone() for key, tensor in strategy.whole(model) if tensor is not None and "lora" not in key}


def scenario(ranks, names, base, directory, kept=None, bits=nf4):
    """name → what a run saw: two steps, its state, gradients and export, whether the base moved, its size; a third step; and
    `kept` given back.
    """
    found = {}
    for name in names:
        strategy = strategy_of(ranks, name, adapter=True)
        model, optimizer = start(strategy, base, bits=bits)
        before = frozen(strategy, model)
        seen = found[name] = {"base": before, "done": train(strategy, model, optimizer, steps=(0, 0))}
        seen["gradients"], seen["state"] = gradients(model), Kept.of(strategy.state(model, optimizer))
        where = Path(directory, f"{name}-{strategy.world_size}")
        # What is rounded is also compared with the weights in memory.
        export_model(model, where, strategy=strategy, dtype=torch.bfloat16 if name == "hsdp" else None)
        seen["check"] = check_export(model, where, SAMPLES, strategy=strategy)
        after = frozen(strategy, model)
        seen["moved"] = [key for key in before if not torch.equal(before[key], after[key])]
        seen["held"] = sum(local(p).nbytes for key, p in model.named_parameters() if "lora" not in key)
        seen["again"] = train(strategy, model, optimizer, steps=(0,))
        if kept is not None:
            strategy = strategy_of(ranks, name, adapter=True)
            model, optimizer = start(strategy, base, kept, bits)
            seen["kept"] = Kept.of(strategy.state(model, optimizer))
            seen["next"] = train(strategy, model, optimizer, steps=(0,))
    return found


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def scenarios(ranks, names, base, directory, kept):
    """(name, bits) → what a run saw, with 4 bits and with 8."""
    return {
        (name, bits): seen
        for bits in (nf4, int8)
        for name, seen in scenario(ranks, names, base, f"{directory}/{bits.__name__}", kept[bits], bits).items()
    }


@pytest.fixture(scope="module")
def one(base):
    """In one process; the export lies beside the base."""
    with alone() as ranks:
        return scenario(ranks, ["single"], base, Path(base).parent)["single"]


@pytest.fixture(scope="module")
def one_int8(base):
    with alone() as ranks:
        return scenario(ranks, ["single"], base, Path(base).parent / "int8", bits=int8)["single"]


def test_in_one_process(base, one):
    """The base is in 4 bits and does not move, the adapter learns, and plain PEFT on a base that is quantized alike gives the
    same logits.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert one["base"]["base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"].dtype == torch.uint8
    assert not one["moved"]
    assert one["done"][0][0] > one["done"][1][0] > one["again"][0][0]
    assert one["check"].difference <= 1e-6
    with alone() as ranks:
        model, _ = start(strategy_of(ranks, "single", adapter=True), base, one["state"])
    plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4(), dtype=torch.float32)
    # In training mode, for on some CPUs plain bitsandbytes computes in bfloat16 in eval mode. There is no dropout.
    plain = PeftModel.from_pretrained(plain, Path(base).parent / "single-1").train()
    ids = torch.tensor([SAMPLES[1][0]])
    torch.testing.assert_close(plain(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-6)


def test_it_is_loaded_as_it_was_trained_or_not_rounded(base, one):
    """By default on the base as it is, as plain PEFT does; as_trained reads the base in the same 4 bits, and gives the
    training's logits.
    """
    directory = Path(base).parent / "single-1"
    noted = adapter_base(directory).quantization
    assert (noted["load_in_4bit"], noted["bnb_4bit_quant_type"], noted["bnb_4bit_use_double_quant"]) == (True, "nf4", True)
    with alone() as ranks:
        model, _ = start(strategy_of(ranks, "single", adapter=True), base, one["state"])
    ids = torch.tensor([SAMPLES[1][0]])
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        again = load_trained(str(directory), dtype=torch.float32, device="cpu", as_trained=True)
        assert again.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8
        torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
        whole = load_trained(str(directory), dtype=torch.float32, device="cpu")
        assert whole.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.float32
        apart = (whole(input_ids=ids).logits - expected).abs().max()
        assert 1e-4 < apart < 0.5


def test_a_rounded_adapter_is_compared_unrounded_too(base, tmp_path):
    """Where the export rounded it, what was read back also computes with the adapter in memory, beside the same codes; a wrong
    scale shows.
    """
    model = adapted(load_model(base, dtype=torch.float32, device="cpu", quantization=nf4()))
    directory = export_model(model, tmp_path / "half", dtype=torch.bfloat16)
    assert check_export(model, directory, SAMPLES).tolerance == 1e-1
    file = directory / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] * 1.01}))
    with pytest.raises(ExportError, match="even with the weights in memory"):
        check_export(model, directory, SAMPLES)


def test_another_code_of_the_base_is_found(base, tmp_path):
    """The base is read again into 4 bits, on the CPU too, and each of its codes is compared: one bit of one code shows."""
    model = adapted(load_model(base, dtype=torch.float32, device="cpu", quantization=nf4()))
    directory = export_model(model, tmp_path / "whole")
    assert check_export(model, directory, SAMPLES).tensors > 0
    codes = model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight.data
    codes.view(-1)[7] ^= 1
    with pytest.raises(ExportError, match=r"layers\.1\.mlp\.up_proj.*weight"):
        check_export(model, directory, SAMPLES)


def test_a_look_in_eval_mode_changes_nothing(base):
    """Gradients after a forward in eval mode are those without it, to the bit: a measurement must not silence the training."""
    found = []
    for look in (False, True):
        model = adapted(load_model(base, dtype=torch.float32, device="cpu", quantization=nf4()))
        ids = torch.tensor([SAMPLES[1][0]])
        if look:
            with torch.no_grad():
                model.eval()(input_ids=ids)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert any(grad.abs().sum() > 0 for grad in found[0].values())


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 divides no codes over ranks")
@pytest.mark.slow
def test_on_two_ranks(base, one, one_int8, tmp_path):
    """ddp holds a copy a rank and fsdp2 half of the codes; both train as one process does, and what that saved goes on there,
    bit for bit.
    """
    alone = {nf4: one, int8: one_int8}
    kept = {bits: seen["state"] for bits, seen in alone.items()}
    for rank in run_on_ranks(scenarios, 2, ["ddp", "fsdp2"], base, str(tmp_path), kept):
        for (name, bits), seen in rank.items():
            one = alone[bits]
            for (loss, norm, _), (expected, expected_norm, _) in zip(seen["done"], one["done"], strict=True):
                assert loss == pytest.approx(expected, rel=1e-5), name
                assert norm == pytest.approx(expected_norm, rel=1e-4), name
            for key, tensor in one["gradients"].items():
                torch.testing.assert_close(seen["gradients"][key], tensor, rtol=1e-3, atol=1e-5)
            assert not seen["moved"], name
            assert seen["base"].keys() in ({}.keys(), one["base"].keys()), name  # rank 0 has the whole
            assert all(torch.equal(seen["base"][key], one["base"][key]) for key in seen["base"]), name
            assert seen["check"].difference <= 1e-6, name
            share = seen["held"] / one["held"]
            assert share == 1 if name == "ddp" else 0.45 < share < 0.6, (name, share)
            assert seen["kept"].keys() == one["state"].keys(), name
            assert all(torch.equal(seen["kept"][key], one["state"][key]) for key in one["state"]), name
            assert seen["next"][0][0] == pytest.approx(one["again"][0][0], rel=1e-5), name


@pytest.mark.lane
@pytest.mark.slow
def test_shards_over_two_of_four_ranks(base, one, tmp_path):
    """hsdp: copies of the base, each divided over two ranks."""
    for rank in run_on_ranks(scenario, 4, ["hsdp"], base, str(tmp_path)):
        assert rank["hsdp"]["done"][0][0] == pytest.approx(one["done"][0][0], rel=1e-5)
        assert rank["hsdp"]["check"].tolerance == 1e-1
        assert 0.45 < rank["hsdp"]["held"] / one["held"] < 0.6


@zero
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_zero_is_refused(base, name):
    """DeepSpeed would flatten codes as if they were numbers: refused by name, with what can be used instead."""
    with alone() as ranks, pytest.raises(StrategyError, match=f"strategy={name}.*use strategy=ddp or fsdp2"):
        strategy_of(ranks, name, adapter=True).load(base, dtype=torch.float32, quantization=nf4())


@pytest.mark.slow
def test_a_gather_dtype_is_refused():
    """Codes cannot be rounded to bfloat16 on their way."""
    with pytest.raises(Exception, match="gather_dtype=bfloat16.*leave it out"):
        run_on_ranks(_gathered, 2)


@pytest.mark.slow
def test_an_old_torch_is_named():
    """torch 2.11 makes every shard a weight that is trained, which codes cannot be: refused before anything is read."""
    with pytest.raises(Exception, match=r"torch 2\.11\.0.*strategy=ddp, or install a newer torch"):
        run_on_ranks(_with_an_old_torch, 2)


def _with_an_old_torch(ranks):
    torch.__version__ = "2.11.0+cu130"
    strategy_of(ranks, "fsdp2", adapter=True).load("nowhere", dtype=torch.float32, quantization=nf4())


def _gathered(ranks):
    strategy_of(ranks, "fsdp2", adapter=True, gather_dtype="bfloat16").load("nowhere", dtype=torch.float32, quantization=nf4())


def test_a_missing_package_is_named(base, monkeypatch):
    """Without bitsandbytes the message says what to install."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else found(name, *rest))
    with pytest.raises(ModelError, match=r"needs bitsandbytes: `pip install 'forge-dist\[bitsandbytes\]'`"):
        load_model(base, dtype=torch.float32, device="cpu", quantization=nf4())


def test_a_quantized_model_is_not_exported(base, tmp_path):
    """Its weights would not be what the directory promises."""
    with pytest.raises(ExportError, match="quantized"):
        export_model(load_model(base, dtype=torch.float32, device="cpu", quantization=nf4()), tmp_path / "out")


def test_a_reward_head_is_spared(base):
    """The new head of a reward model is trained, so it stays a float."""
    model = load_model(base, dtype=torch.float32, device="cpu", quantization=nf4(), task="reward")
    assert type(model.score) is torch.nn.Linear
    assert model.score.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8


def load_int8(folder, **how):
    return load_model(folder, dtype=torch.float32, device="cpu", quantization=int8(), **how)


def test_8_bits_are_those_of_transformers(base):
    """Bit for bit those of transformers' own load, whose logits in training mode on a CPU are the same too."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=int8(), dtype=torch.float32).train()
    ours, ids = load_int8(base), torch.tensor([SAMPLES[1][0]])
    assert len(int8_layers(ours)) == 14
    for name, layer in int8_layers(ours).items():
        theirs = plain.get_submodule(name).weight
        assert torch.equal(layer.weight.data, theirs.data), name
        assert torch.equal(layer.scales, theirs.SCB), name
    assert type(ours.lm_head) is torch.nn.Linear
    expected = plain(input_ids=ids).logits
    for model in (ours.train(), ours.eval()):
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_an_outline_in_8_bits_has_its_sizes(base):
    """What a memory plan counts is a byte a weight and four a row."""
    request = LoadRequest(model_path=base, dtype=torch.float32, attention="sdpa", quantization=int8())
    outline, model = outline_model(request), load_int8(base)
    sizes = [sum(t.nbytes for t in (*m.parameters(), *m.buffers())) for m in (outline, model)]
    assert sizes[0] == sizes[1]
    assert {name: t.dtype for name, t in outline.named_parameters()} == {n: t.dtype for n, t in model.named_parameters()}
    layer = int8_layers(outline)["model.layers.0.mlp.up_proj"]
    assert layer.weight.nbytes + layer.scales.nbytes == 36 * 48 + 36 * 4


def test_an_export_beside_8_bits_is_checked_and_read_as_it_was_trained(base, tmp_path):
    """The base is noted in 8 bits and read so again; one bit of one code shows."""
    model = adapted(load_int8(base)).eval()
    directory = export_model(model, tmp_path / "export")
    assert check_export(model, directory, SAMPLES).difference <= 1e-6
    assert adapter_base(directory).quantization["load_in_8bit"] is True
    ids = torch.tensor([SAMPLES[1][0]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        again = load_trained(str(directory), dtype=torch.float32, device="cpu", as_trained=True)
        torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
        whole = load_trained(str(directory), dtype=torch.float32, device="cpu")
        assert not int8_layers(whole)
        assert 1e-5 < (whole(input_ids=ids).logits - expected).abs().max() < 0.1
    codes = model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight.data
    codes.view(-1)[7] ^= 1
    with pytest.raises(ExportError, match=r"layers\.1\.mlp\.up_proj.*weight"):
        check_export(model, directory, SAMPLES)


def test_a_reward_head_is_spared_8_bits(base):
    model = load_int8(base, task="reward")
    assert type(model.score) is torch.nn.Linear
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
