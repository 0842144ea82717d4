"""The routers' auxiliary loss is transformers' own over the whole step, however the step is cut."""

from importlib import import_module

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from forge_algos import (
    SFT,
    AdapterSettings,
    MoESettings,
    adapt,
    keep_documents_apart,
    routers_of,
    train,
)
from forge_algos.training._router_loss import _Recorder

from ..oracle import CPU, SIZES, distance, gradients, make, naive, pack, samples
from ..preferences import shareable
from ..threads import on_threads

LENGTHS = (5, 9, 2, 7, 13, 4)
COEFFICIENT = 0.5


def mixture(kind="qwen3_moe", *, attention=None, **extra):
    """Return a tiny mixture of experts in training mode whose routers prefer some experts."""
    experts = {"num_experts_per_tok": 2, "router_aux_loss_coef": COEFFICIENT, "output_router_logits": False}
    small = {**SIZES, "head_dim": 4, **experts}
    config = {
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**small, num_experts=4, moe_intermediate_size=8, **extra),
        "mixtral": lambda: transformers.MixtralConfig(**small, num_local_experts=4, **extra),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **small, num_local_experts=4, layer_types=["sliding_attention", "full_attention"], sliding_window=4
        ),
        "granite": lambda: transformers.GraniteMoeConfig(**SIZES, **experts, num_local_experts=4),
        "deepseek": lambda: transformers.DeepseekV3Config(**SIZES),
    }[kind]()
    config._attn_implementation = attention or ("eager" if kind == "gpt_oss" else "sdpa")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def reference(model, parts):
    """Return (loss, aux loss) of a step, one unpadded document a forward; `parts` are groups whose aux loss is their own."""
    losses = [naive(model, [example]) for part in parts for example in part]
    balance = import_module(type(model).__module__).load_balancing_loss_func
    found = []
    for part in parts:
        outs = [model(input_ids=torch.tensor(ids)[None], output_router_logits=True, use_cache=False) for ids, _ in part]
        layers = tuple(torch.cat(layer) for layer in zip(*(out.router_logits for out in outs), strict=True))
        found.append(balance(layers, layers[0].shape[-1], 2))
    aux = torch.stack(found).mean()
    return sum(loss for loss, _ in losses) / sum(count for _, count in losses) + COEFFICIENT * aux, aux


def one_step(model, micro_batches, *, objective=None, **options):
    """Return the output of a step that leaves the weights, and its gradients."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    model.zero_grad()
    (output,) = train(
        model,
        [micro_batches],
        objective=objective or SFT(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        max_grad_norm=0,
        device=CPU,
        **options,
    )
    return output, gradients(model)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "granite", "gpt_oss"])
@pytest.mark.parametrize("cut", [(6,), pytest.param((3, 3), marks=pytest.mark.slow), (1, 2, 0, 3)], ids=str)
def test_global_is_transformers_over_the_whole_step(kind, cut):
    """Loss, gradients and the reported value are those of one unpadded document a forward, in one micro-batch or four."""
    model, examples = mixture(kind), samples(LENGTHS, learned=1.0)
    packed, _ = keep_documents_apart(model, device=CPU)
    assert packed == (kind != "gpt_oss")
    expected, aux = reference(model, [examples])
    expected.backward()
    theirs = gradients(model)
    remaining = iter(examples)
    output, ours = one_step(model, [pack([next(remaining) for _ in range(number)]) for number in cut])
    assert output.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert output.figures["aux_loss"] == pytest.approx(float(aux.detach()), rel=1e-6)
    assert distance(ours, theirs) < 1e-5
    assert len(output.expert_load) == 2
    assert all(len(layer) == 4 and sum(layer) == pytest.approx(1, abs=1e-5) for layer in output.expert_load)


def test_trl_is_the_mean_of_the_micro_batches():
    """Each micro-batch has an auxiliary loss of its own, as TRL 1.16 has it."""
    model, examples = mixture(), samples(LENGTHS, learned=1.0)
    parts = [examples[:2], examples[2:5], examples[5:]]
    expected, aux = reference(model, parts)
    expected.backward()
    theirs = gradients(model)
    output, ours = one_step(model, [pack(part) for part in parts], moe_aux_loss="trl")
    assert output.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert output.figures["aux_loss"] == pytest.approx(float(aux.detach()), rel=1e-6)
    assert distance(ours, theirs) < 1e-5


def test_off_and_a_coefficient_of_zero_give_the_plain_loss():
    """Nothing is added, and nothing is reported."""
    model, examples = mixture(), samples(LENGTHS, learned=1.0)
    loss, count = naive(model, examples)
    plain = float(loss.detach()) / count
    output, _ = one_step(model, [pack(examples)], moe_aux_loss="off")
    assert (output.loss, output.expert_load) == (pytest.approx(plain, rel=1e-6), ())
    assert "aux_loss" not in output.figures
    assert routers_of(mixture("deepseek"), device=CPU)[0] is None
    aux = one_step(model, [pack(examples)])[0].figures["aux_loss"]
    model.router_aux_loss_coef = model.config.router_aux_loss_coef = 0.0
    assert one_step(model, [pack(examples)])[0].loss == pytest.approx(plain, rel=1e-6)
    # A coefficient of the run stands in the place of the model's, also where that is 0.
    output, _ = one_step(model, [pack(examples)], router_aux_loss_coef=0.3)
    assert (output.loss, output.figures["aux_loss"]) == pytest.approx((plain + 0.3 * aux, aux), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["global", "trl"])
@pytest.mark.parametrize("shards", [(4, 1), (4, 2)], ids=["four ranks", "two shards"])
def test_ranks_are_one_process(kind, shards):
    """A step over ranks has the loss and gradients of one process, also where a rank has nothing to learn."""
    examples = samples(LENGTHS, learned=1.0)
    world, ranks_a_shard = shards
    number = world // ranks_a_shard
    parts = [examples[shard::number] for shard in range(number)]
    # One shard without work in the second column.
    cuts = [[pack(part[:1]), pack(part[1:] if shard else [])] for shard, part in enumerate(parts)]
    alone = [batch for cut in cuts for batch in cut]
    expected, gradient = one_step(mixture(), alone, moe_aux_loss=kind)

    def run(rank):
        model = mixture()
        rank.parameters = list(model.parameters())
        return one_step(model, cuts[rank.data_parallel_rank], moe_aux_loss=kind, parallel=rank)

    for output, found in on_threads(run, world, ranks_a_shard):
        assert output.loss == pytest.approx(expected.loss, rel=1e-6)
        assert output.figures["aux_loss"] == pytest.approx(expected.figures["aux_loss"], rel=1e-6)
        torch.testing.assert_close(torch.tensor(output.expert_load), torch.tensor(expected.expert_load))
        assert distance(found, gradient) < 1e-5


def test_one_micro_batch_a_rank_needs_no_further_forward():
    """The totals are exchanged between the forward and the backward pass."""
    model, calls = mixture(), []
    examples = samples(LENGTHS, learned=1.0)
    one_step(model, [pack(examples)])
    model.model.register_forward_hook(lambda *_: calls.append(model.training))
    one_step(model, [pack(examples)])
    assert calls.count(True) == 1
    calls.clear()
    one_step(model, [pack(examples[:3]), pack(examples[3:])])
    assert calls.count(True) == 4


def test_noise_is_the_same_in_both_forwards():
    """With dropout the load that is measured first is that of the forwards that are trained."""
    model = mixture(attention_dropout=0.5)
    examples = samples(LENGTHS, learned=1.0)
    parts = [pack(examples[:3]), pack(examples[3:])]
    seen = []
    model.model.register_forward_hook(
        lambda module, _args, out: seen.append(torch.stack(out.router_logits).detach()) if module.training else None
    )
    torch.manual_seed(3)
    one_step(model, parts)
    first, second, *trained = seen
    torch.testing.assert_close(trained, [first, second], rtol=0, atol=0)


def test_checkpointed_layers_count_once():
    """Layers that run again in the backward pass do not add to the load."""
    model, examples = mixture(), samples(LENGTHS, learned=1.0)
    expected, gradient = one_step(model, [pack(examples)])
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)({"use_reentrant": False})
    output, found = one_step(model, [pack(examples)])
    assert (output.loss, output.expert_load) == (pytest.approx(expected.loss, rel=1e-6), expected.expert_load)
    assert distance(found, gradient) < 1e-5


def test_padding_of_virtual_tokens_does_not_count():
    """Prefix tuning lays documents out in padded lines: the load is that of the documents alone."""
    model, examples = mixture(attention="eager"), samples(LENGTHS, learned=1.0)
    model = adapt(model, AdapterSettings(adapter="prefix", num_virtual_tokens=3)).model
    expected = 0.0
    with torch.no_grad():
        _, outs = model.eval(), []
        for ids, _ in examples:
            outs.append(model(input_ids=torch.tensor(ids)[None], output_router_logits=True, use_cache=False).router_logits)
    layers = tuple(torch.cat(layer) for layer in zip(*outs, strict=True))
    expected = float(import_module(type(model.base_model).__module__).load_balancing_loss_func(layers, 4, 2))
    output, _ = one_step(model, [pack(examples)])
    assert output.figures["aux_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_coefficient_of_a_loss_that_is_off_is_refused():
    """It would have no effect; so would one of 0, which is no weight."""
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.1 has no effect with moe_aux_loss='off'"):
        MoESettings(moe_aux_loss="off", router_aux_loss_coef=0.1)
    with pytest.raises(ValueError, match="router_aux_loss_coef must be above 0; moe_aux_loss='off' adds no such loss"):
        MoESettings(router_aux_loss_coef=0.0)


def test_what_was_found_is_said(monkeypatch):
    """A dense model has no routers; a class that balances otherwise, or gives no logits, is named."""
    assert routers_of(make("llama-tied"), device=CPU) == (None, "")
    found, why = routers_of(mixture(), device=CPU)
    assert (found.layers, found.experts, found.top_k, found.coefficient) == (2, 4, 2, COEFFICIENT)
    assert why == "2 layers of 4 experts, 2 a token; router_aux_loss_coef 0.5"
    assert routers_of(mixture(), device=CPU, coefficient=0.1)[1].endswith("router_aux_loss_coef 0.1")
    dense = routers_of(make("llama-tied"), device=CPU, coefficient=0.1)
    assert dense == (None, "LlamaForCausalLM names no number of experts for a token (num_experts_per_tok)")
    model = mixture()
    monkeypatch.setattr(import_module(type(model).__module__), "load_balancing_loss_func", lambda *_: torch.tensor(7.0))
    found, why = routers_of(model, device=CPU)
    assert found is None
    assert "Qwen3MoeForCausalLM balances its experts by another formula (7.0000" in why
    model = make("llama-tied")
    model.config.router_aux_loss_coef, model.config.num_experts_per_tok = 0.1, 2
    assert routers_of(model, device=CPU) == (None, "LlamaForCausalLM returns no router logits")


def test_shared_prompts_are_counted_without_a_look_at_the_device():
    """Places count as often as `kv_rows` names them; a GPU's host waits for no number of them."""
    model = shareable(mixture())
    rows = torch.tensor([0, 1, 2, 3, 0, 1, 4, 5])
    ends, ends_k = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([0, 4, 8], dtype=torch.int32)
    ids, positions = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[0, 1, 2, 3, 2, 3]])
    seen = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Recorded(_Recorder):
        def _after(self, *args):
            with Calls():
                super()._after(*args)

    recorder = Recorded(model, 2)
    with recorder.hooked(), recorder.recording():
        output = model.model(
            input_ids=ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends_k, kv_rows=rows, use_cache=False
        )
    (found,) = recorder.found
    layers = [torch.softmax(layer, dim=-1) for layer in output.router_logits]
    assert found.rows == len(rows) * len(layers)
    assert torch.allclose(found.probabilities, sum(layer[rows].sum(0) for layer in layers), rtol=1e-5)
    expected = torch.stack([torch.bincount(layer[rows].topk(2).indices.flatten(), minlength=4) for layer in layers])
    assert torch.equal(found.loads, expected.float())
    assert seen
    assert not [name for name in seen if "bincount" in name or "_local_scalar_dense" in name]
