"""Virtual tokens and adaption prompts: packed rows equal plain PEFT on single documents.
For every objective.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from peft import AdaptionPromptConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from forge_algos import (
    DPO,
    KTO,
    ORPO,
    SFT,
    AdapterSettings,
    Distill,
    DistillSettings,
    DPOSettings,
    KTOSettings,
    OptimizerSettings,
    Reward,
    SupervisedSettings,
    adapt,
    make_optimizer,
    schedule,
    train,
)
from forge_algos.batches._packed import packed_inputs
from forge_algos.objectives import choose_head

from ...oracle import CPU, VOCAB, distance, gradients, make, naive, pack, samples
from ...preferences import (
    a_classifier,
    kto_batch,
    loss_and_gradients,
    naive_dpo,
    naive_kto,
    naive_orpo,
    naive_reward,
    one_step,
    pair_batch,
    rotated,
    some_pairs,
)

VIRTUAL = 3
IDS = torch.arange(3, 12)[None]
EXAMPLES = samples((5, 9, 2, 7))
PAIRS = some_pairs(5, seed=7)
KINDS = {
    "prefix": AdapterSettings(adapter="prefix", num_virtual_tokens=VIRTUAL),
    "projected": AdapterSettings(adapter="prefix", num_virtual_tokens=VIRTUAL, prefix_projection=True),
    "prompt": AdapterSettings(adapter="prompt", num_virtual_tokens=VIRTUAL),
    "adapter_prompt": AdapterSettings(adapter="adapter_prompt", num_virtual_tokens=VIRTUAL),
}
every = pytest.mark.parametrize("kind", KINDS)
virtual = pytest.mark.parametrize("kind", ["prefix", "prompt"])


def gpt2():
    sizes = {
        "vocab_size": VOCAB,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def adapted(kind, base=None, *, gate=0.6):
    """Return the model with a fresh adapter, every adaption gate at `gate`.
    A gate of zero would let nothing through.
    """
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = adapt(make() if base is None else base, KINDS[kind]).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adaption_gate"):
                parameter.fill_(gate)
    return model


def alone(model):
    """Return plain PEFT's logits of one document, without the places of its virtual tokens."""
    return lambda input_ids, **kwargs: SimpleNamespace(logits=model(input_ids, **kwargs).logits[:, -input_ids.shape[1] :])


def naive_kl(teacher, model):
    """Return KL(teacher ‖ model) as a mean over losses_of tokens, one document at a time."""
    found = []
    for ids, labels in EXAMPLES:
        rows = torch.tensor(labels)[1:] != -100
        theirs, ours = (each(torch.tensor(ids)[None]).logits[0, :-1][rows].log_softmax(-1) for each in (teacher, model))
        found.append((theirs.detach().exp() * (theirs.detach() - ours)).sum(-1))
    return torch.cat(found).mean()


def losses_of(model, *, steps=12, rate=0.03):
    """Return the losses of some steps on one row."""
    settings = OptimizerSettings(learning_rate=rate)
    optimizer = make_optimizer(model, settings)
    rows = [[pack(samples([6, 9, 4], learned=1.0))]] * steps
    outputs = train(model, rows, objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, settings, steps))
    return [output.loss for output in outputs]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        *(
            (kind, name)
            for kind in ("prefix", "prompt")
            for name in ("llama-tied", "llama-untied", "qwen3", "gemma3", "granite", "gpt2")
        ),
        ("projected", "llama-tied"),
        ("adapter_prompt", "llama-untied"),
        ("adapter_prompt", "gpt2"),
    ],
)
def test_sft_equals_one_document_at_a_time(kind, architecture, attention):
    """Loss and gradients of a row with documents of unequal length equal those of single ones.
    On models that embed, mask or cap in different ways.
    """
    base = gpt2() if architecture == "gpt2" else make(architecture)
    base.set_attn_implementation(attention)
    model = adapted(kind, base)
    terms = SFT().bind(model, device=CPU)(pack(EXAMPLES), [])
    terms.sum.backward()
    mine = gradients(model)
    model.zero_grad()
    total, count = naive(alone(model), EXAMPLES)
    total.backward()
    assert terms.count == count
    assert terms.sum.item() == pytest.approx(total.item(), rel=1e-5)
    assert distance(mine, gradients(model)) < 1e-5
    assert {name.split(".")[-1] for name in mine} <= {"weight", "bias", "adaption_prompt", "adaption_gate"}


@every
def test_dpo_with_the_adapter_switched_off(kind):
    """DPO with policy and reference in one model equals the formula, pair by pair.
    The reference is the plain base.
    """
    model = adapted(kind)
    objective = DPO(DPOSettings(reference="adapter_off"))
    output, grads = one_step(model, objective, [pair_batch(PAIRS[:2]), pair_batch(PAIRS[2:])])
    loss, theirs = loss_and_gradients(model, naive_dpo(alone(model), PAIRS, make()))
    assert output.loss == pytest.approx(loss, rel=1e-5)
    assert distance(grads, theirs) < 1e-5


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, name) for kind in ("prefix", "prompt") for name in ("kto", "orpo", "distill")), ("prefix", "reward")],
)
def test_other_objectives(kind, name):
    """Each objective has its naive loss and gradients; a reward model's score is trained whole."""
    model = adapted(kind, a_classifier() if name == "reward" else None)
    lone = alone(model)
    batch, expected = pair_batch(PAIRS), partial(naive_orpo, lone, PAIRS)
    objective = ORPO()
    if name == "kto":
        kinds = np.arange(len(PAIRS)) % 2 > 0
        objective, batch = KTO(KTOSettings(beta=0.5, reference="adapter_off")), kto_batch(PAIRS, kinds, rotated(PAIRS))
        expected = partial(naive_kto, lone, PAIRS, kinds, rotated(PAIRS), make(), beta=0.5)
    elif name == "reward":
        objective, expected = Reward(), partial(naive_reward, model, PAIRS)
    elif name == "distill":
        teacher = adapted("prompt", make(seed=4))
        objective, batch = Distill(settings=DistillSettings(teacher_path="unread", beta=0.0), teacher=teacher), pack(EXAMPLES)
        expected = partial(naive_kl, alone(teacher), lone)
    output, grads = one_step(model, objective, [batch])
    loss, theirs = loss_and_gradients(model, expected())
    assert output.loss == pytest.approx(loss, rel=1e-5)
    assert distance(grads, theirs) < 1e-5
    assert any("score" in key for key in grads) == (name == "reward")


@virtual
def test_both_ways_of_the_head(kind):
    """Both ways of scoring work, and values computed beside them come in the row's order."""
    model = adapted(kind)
    head = choose_head(model, device=CPU)
    assert head.name == "chunked"
    row = pack(EXAMPLES)
    inputs = packed_inputs(
        *(torch.tensor(array) for array in (row.input_ids, row.position_ids, row.cu_seqlens)), row.max_seqlen
    )
    rows, targets = torch.tensor([0, 6, 6, 15, 22]), torch.tensor([4, 5, 9, 11, 3])
    found = [
        each.logps(inputs, rows, targets, beside=lambda hidden: hidden.clone())
        for each in (head, type(head)(model=model, name="logits", reason="asked for"))
    ]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert found[0][1].shape == (len(row.input_ids), 16)


@virtual
def test_noise_goes_by_the_document(kind):
    """NEFTune's bound is that of each document's own length, in padded lines as in a row."""
    model, seen, lengths = adapted(kind), [], [len(ids) for ids, _ in EXAMPLES]
    model.get_base_model().model.layers[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0].detach()))
    for alpha in (0.0, 5.0):
        seen.clear()
        SFT(SupervisedSettings(neftune_alpha=alpha)).bind(model, device=CPU)(pack(EXAMPLES), [])
        states = seen[-1][:, -max(lengths) :]
        if not alpha:
            clean = states
    for length, noise in zip(lengths, states - clean, strict=True):
        most = 5.0 / (length * 16) ** 0.5
        assert 0.8 * most < noise[:length].abs().max() <= most * 1.0001


@every
def test_initial_weights_are_pefts_own(kind):
    """At the same torch seed the adapter is PEFT's, whatever else is prepared."""
    configs = {
        "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
        "projected": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, prefix_projection=True),
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, prompt_tuning_init="SAMPLE_VOCAB"),
        "adapter_prompt": AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=VIRTUAL, adapter_layers=2),
    }
    base = make()
    base.is_gradient_checkpointing  # noqa: B018  PEFT asks for it by an old name: its warning is not what is tested
    torch.manual_seed(1)
    theirs = get_peft_model(base, configs[kind])
    mine, wanted = (
        {name: p for name, p in model.named_parameters() if p.requires_grad} for model in (adapted(kind, gate=0.0), theirs)
    )
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert {p.dtype for p in mine.values()} == {torch.float32}


@pytest.mark.slow
@every
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # by plain PEFT 0.21, as of transformers 5.24
def test_it_learns_and_the_directory_is_plain(kind, tmp_path):
    """The loss falls, the base keeps its bits, and plain PEFT reads the directory.
    On the same base it gives the same logits.
    """
    make().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = adapted(kind, base, gate=0.0)
    losses = losses_of(model)
    assert losses[-1] < losses[0] - 0.05
    after = {
        name.replace(".self_attn.model.", ".self_attn."): tensor for name, tensor in model.get_base_model().state_dict().items()
    }
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    model.save_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, model.eval()(IDS).logits, rtol=0, atol=1e-6)


@every
def test_resuming_from_a_state(kind):
    """The trained parameters are the whole state.
    Loaded into a fresh model, they give the same losses, to the bit.
    """
    model = adapted(kind)
    losses_of(model, steps=2)
    state = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    again = adapted(kind)
    again.load_state_dict(state, strict=False)
    assert losses_of(model, steps=3) == losses_of(again, steps=3)


@every
def test_a_base_in_bfloat16(kind):
    """The adapter stays in float32, in which small steps count, and learns."""
    model = adapted(kind, make().bfloat16(), gate=0.0)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    losses = losses_of(model)
    assert losses[-1] < losses[0] - 0.05


def test_a_prompts_initial_text(tmp_path):
    """`prompt_init_text` begins as its tokens' embeddings, repeated where it is short.
    The tokenizer is that of the model's path.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 7, "b": 9, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    base = make()
    settings = AdapterSettings(adapter="prompt", num_virtual_tokens=VIRTUAL, prompt_init_text="b a")
    model = adapt(base, settings, tokenizer_path=str(tmp_path)).model
    wanted = base.get_input_embeddings().weight[[9, 7, 9]]
    assert torch.equal(model.prompt_encoder["default"].embedding.weight, wanted)


def test_adaption_prompts_on_the_uppermost_layers():
    """`adapter_layers` counts from the top, and all layers are the default."""
    for layers, wanted in ((1, {1}), (None, {0, 1})):
        settings = AdapterSettings(adapter="adapter_prompt", num_virtual_tokens=VIRTUAL, adapter_layers=layers)
        names = [name for name, p in adapt(make(), settings).model.named_parameters() if p.requires_grad]
        assert {int(name.split("layers.")[1].split(".")[0]) for name in names} == wanted
