"""qlora: loading its base, refused combinations, and 4 or 8 bits that training leaves alone."""

import sys

import attrs
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from forge_algos import (
    SFT,
    AdapterError,
    AdapterSettings,
    MissingPackageError,
    OptimizerSettings,
    adapt,
    evaluate,
    make_optimizer,
    quantization_config,
    schedule,
    train,
)

from ...oracle import distance, gradients, make, naive, pack, samples
from .test_attach import IDS, LORA, same, saved, state, trained

QLORA = AdapterSettings(adapter="qlora", lora_r=3, lora_alpha=5.0)
INT8 = AdapterSettings(adapter="qlora", quant_type="int8", lora_r=3, lora_alpha=5.0)

needs_bitsandbytes = pytest.mark.skipif(
    not transformers.utils.is_bitsandbytes_available(), reason="bitsandbytes, an extra, is not installed"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a tiny model's weights."""
    folder = tmp_path_factory.mktemp("base")
    make().save_pretrained(folder)
    return folder


def load(folder, settings=QLORA):
    config = quantization_config(settings, torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32).train()


def weights(model):
    """Return the bytes of the quantised weights and of what scales them."""
    return {n: t for n, t in state(model).items() if "base_layer" in n}


def logits(model):
    """Return logits in the model's own mode: bitsandbytes computes differently in evaluation."""
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_only_qlora_quantises():
    """The result is None for every other adapter, and so can always be passed on."""
    for adapter in ("none", "lora", "dora", "osft"):
        assert quantization_config(AdapterSettings(adapter=adapter), torch.float32) is None


@needs_bitsandbytes
def test_settings_arrive():
    """Kind, double quantisation and the dtype of the products are set."""
    config = quantization_config(AdapterSettings(adapter="qlora"), torch.bfloat16)
    found = config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant, config.bnb_4bit_compute_dtype
    assert found == (True, "nf4", True, torch.bfloat16)
    config = quantization_config(AdapterSettings(adapter="qlora", quant_type="fp4", double_quant=False), torch.float32)
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("fp4", False)
    config = quantization_config(INT8, torch.bfloat16)
    assert (config.load_in_8bit, config.load_in_4bit) == (True, False)


def test_missing_bitsandbytes_is_named(monkeypatch):
    """Where bitsandbytes is missing the error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'forge-algos\[bitsandbytes\]'`, or use adapter=lora") as caught:
        quantization_config(QLORA, torch.float32)
    assert caught.value.exit_status == 2


@needs_bitsandbytes
@pytest.mark.parametrize("adapter", ["none", "lora", "dora", "ia3", "osft"])
def test_a_quantised_base_needs_qlora(base, adapter):
    """Any other adapter on a quantised base is refused; the error names qlora."""
    for settings in (QLORA, INT8):
        with pytest.raises(
            AdapterError, match=f"quantised, which adapter={adapter} does not expect: use adapter=qlora or qoft"
        ):
            adapt(load(base, settings), AdapterSettings(adapter=adapter))


@needs_bitsandbytes
@pytest.mark.parametrize(("loaded", "asked", "remedy"), [(QLORA, INT8, "nf4 or fp4"), (INT8, QLORA, "int8")])
def test_other_bits_than_the_bases_are_refused(base, loaded, asked, remedy):
    """quant_type must say what the base is in: the error names the type that does."""
    with pytest.raises(AdapterError, match=f"quant_type={asked.quant_type} is a base in .* bits, .*: set quant_type={remedy}"):
        adapt(load(base, loaded), asked)


def test_qlora_needs_a_quantised_base():
    """qlora on a plain base is refused: it would silently be lora."""
    with pytest.raises(
        AdapterError, match=r"LlamaForCausalLM's weights are not quantised: load it with quantization_config=.*adapter=lora"
    ):
        adapt(make(), QLORA)


@needs_bitsandbytes
@pytest.mark.parametrize(
    "settings", [QLORA, AdapterSettings(adapter="qlora", quant_type="fp4", double_quant=False, lora_r=3), INT8]
)
def test_it_begins_as_pefts_and_learns_beside_constant_bits(base, settings, tmp_path):
    """The adapter begins as PEFT's and learns; the base's bytes never change.
    Plain PEFT has the same logits on a base quantised in the same way.
    """
    torch.manual_seed(3)
    adaptation = adapt(load(base, settings), settings)
    model = adaptation.model
    torch.manual_seed(3)
    theirs = get_peft_model(
        load(base, settings),
        LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=settings.lora_alpha, target_modules="all-linear"),
    )
    assert same(state(model), state(theirs))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert adaptation.describe()[1] == "trains 1,392 of 6,288 parameters (22.14 %)"
    before = weights(model)
    assert any("quant_state" in name or name.endswith("SCB") for name in before)
    row = pack(samples([6, 9, 4], learned=1.0))
    first = evaluate(model, [row], objective=SFT()).loss
    losses = trained(model)
    assert losses[0] == pytest.approx(first, rel=1e-5)
    assert evaluate(model, [row], objective=SFT()).loss < 0.9 * first
    assert same(weights(model), before)
    folder, _ = saved(model, tmp_path)
    model.train()
    plain = PeftModel.from_pretrained(load(base, settings), folder)
    torch.testing.assert_close(logits(plain.train()), logits(model), rtol=0, atol=1e-6)


@needs_bitsandbytes
@pytest.mark.parametrize("quant_type", ["nf4", "int8"])
def test_rotations_beside_a_quantised_base(base, quant_type):
    """qoft's loss and gradients of a packed row are those of oft over single samples on the dequantised base."""
    settings = AdapterSettings(adapter="qoft", quant_type=quant_type, oft_block_size=4)
    model, plain = load(base, settings), load(base, settings).dequantize(dtype=torch.float32)
    adapted = []
    for each, of in ((model, settings), (plain, AdapterSettings(adapter="oft", oft_block_size=4))):
        adapted.append(adapt(each, of).model)
        torch.manual_seed(3)
        for parameter in (p for p in adapted[-1].parameters() if p.requires_grad):
            torch.nn.init.normal_(parameter, std=0.1)
    rows = samples([6, 9, 4], learned=1.0)
    total, count = naive(adapted[1].train(), rows)
    (total / count).backward()
    before, found = weights(adapted[0]), {}
    optimizer = make_optimizer(adapted[0], OptimizerSettings())
    assert optimizer.param_groups[0]["lr"] == 1e-4
    optimizer.register_step_pre_hook(lambda *_: found.update(gradients(adapted[0])))
    scheduler = schedule(optimizer, OptimizerSettings(), num_steps=1)
    (output,) = train(adapted[0], [[pack(rows)]], objective=SFT(), optimizer=optimizer, scheduler=scheduler, max_grad_norm=0.0)
    assert output.loss == pytest.approx(total.item() / count, rel=1e-6)
    assert distance(found, gradients(adapted[1])) < 2e-6
    assert same(weights(adapted[0]), before)


@needs_bitsandbytes
def test_an_evaluation_on_any_processor_leaves_the_weights_trainable(base, monkeypatch):
    """An evaluation leaves the weights trainable on any processor.
    With AVX512-BF16 bitsandbytes would pack them anew and let no gradient through.
    """
    model = load(base)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = True
    adapted = adapt(model, QLORA).model
    before = weights(adapted)
    evaluate(adapted, [pack(samples([5], learned=1.0))], objective=SFT())
    trained(adapted, steps=1)
    assert same(weights(adapted), before)
    first = next(p for n, p in adapted.named_parameters() if "layers.0.self_attn.q_proj.lora_B" in n)
    assert first.abs().max() > 0


@needs_bitsandbytes
@pytest.mark.parametrize("looked", [False, True])
def test_8_bits_are_multiplied_as_the_numbers_they_stand_for(base, looked):
    """In training and in evaluation, and wherever a sample lies: loss and gradients are those of plain LoRA on the
    dequantised base. A forward before `adapt` changes nothing.
    """
    model, row = load(base, INT8), pack(samples([6, 9, 4], learned=1.0))
    if looked:
        logits(model.eval())
    plain = load(base, INT8).dequantize(dtype=torch.float32)
    found = []
    for each, settings in ((model, INT8), (plain, attrs.evolve(INT8, adapter="lora", quant_type="nf4"))):
        torch.manual_seed(3)
        adapted = adapt(each, settings).model
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
        adapted.eval()(input_ids=IDS, labels=IDS).loss.backward()
        grads = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
        rows = [row, *(pack([sample]) for sample in samples([6, 9, 4], learned=1.0))]
        found.append(([evaluate(adapted, [each], objective=SFT()).loss for each in rows], grads))
    (losses, grads), (expected, expected_grads) = found
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6)


@needs_bitsandbytes
def test_weights_that_were_packed_for_the_processor_are_refused(base):
    """Weights packed for the processor are refused with what to do: they pass no gradient."""
    model = load(base)
    model.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(AdapterError, match=r"model\.layers\.1\.mlp\.up_proj was evaluated on the CPU.*load the model again"):
        adapt(model, QLORA)


def test_lora_on_a_plain_base_needs_no_bitsandbytes():
    """lora on a plain base works without bitsandbytes."""
    assert adapt(make(), LORA).writes == "adapter"


def test_quantised_modules_to_save_are_refused(base):
    """Codes of 4 bits cannot train; PEFT's own error names no module."""
    settings = AdapterSettings(adapter="qlora", target_modules=["q_proj"], modules_to_save=["up_proj"])
    with pytest.raises(AdapterError, match="modules_to_save: .*up_proj is quantised.*codes cannot train"):
        adapt(load(base, settings), settings)
