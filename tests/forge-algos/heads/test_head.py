"""How positions are scored is decided by running the model, and is right for each model."""

import pytest
import torch
import transformers

from forge_algos import AdapterSettings, adapt, nll
from forge_algos.batches._packed import packed_inputs
from forge_algos.objectives import choose_head

from ..oracle import ARCHITECTURES, CPU, SIZES, make


class Squashed(transformers.LlamaForCausalLM):
    """A model whose logits go through a function that no config names.
    Small logits hardly show it.
    """

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 20 * torch.tanh(out.logits / 20)
        return out


class Terse(transformers.LlamaForCausalLM):
    """A model whose forward cannot select logits, and whose logits are its head's times 3."""

    def forward(self, input_ids, position_ids=None, use_cache=None, **kwargs):
        out = super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs)
        out.logits = out.logits * 3
        return out


class Twice(transformers.LlamaForCausalLM):
    """A model that calls its head two times."""

    def forward(self, input_ids, logits_to_keep=0, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state[
            :, logits_to_keep if torch.is_tensor(logits_to_keep) else slice(None)
        ]
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden) + self.lm_head(2 * hidden))


class Detour(transformers.LlamaForCausalLM):
    """A model whose head gets other inputs than its decoder's output."""

    def forward(self, input_ids, logits_to_keep=0, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state[
            :, logits_to_keep if torch.is_tensor(logits_to_keep) else slice(None)
        ]
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden.flip(-1)))


class Last(transformers.LlamaForCausalLM):
    """A model that by itself scores the last position only."""

    def forward(self, input_ids, logits_to_keep=1, **kwargs):
        return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)


class Counting(transformers.LlamaForCausalLM):
    """A model that counts the rows of its logits."""

    def forward(self, input_ids, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        kept = kwargs.get("logits_to_keep")
        out.logits = out.logits.view(1, input_ids.shape[1] if kept is None else len(kept), self.config.vocab_size)
        return out


class Turned(transformers.LlamaForCausalLM):
    """A model that reverses its hidden states before the head, and the logits behind it."""

    def forward(self, input_ids, logits_to_keep=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden.flip(1)).flip(1)
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            logits=logits if logits_to_keep is None else logits[:, logits_to_keep]
        )


def unusual_model(kind):
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**SIZES)).train()


def check(model, name, *, words="", **keep):
    """Check that the chosen way has the value and gradients of cross entropy of the logits."""
    head = choose_head(model, device=CPU)
    assert head.name == name, head.reason
    assert words in head.reason
    ids = torch.arange(7, 14)
    inputs = packed_inputs(ids, torch.arange(7), torch.tensor([0, 7]), 7)
    rows, targets = torch.tensor([1, 2, 5]), torch.tensor([9, 3, 60])
    model.zero_grad()
    terms = head.nll(inputs, rows, targets)
    terms.sum.backward()
    mine = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model(**inputs, **keep).logits[0, rows].float()
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    expected.backward()
    assert terms.count == 3
    assert abs(terms.sum.item() / expected.item() - 1) < 1e-6
    assert mine
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(mine[n], p.grad, rtol=1e-4, atol=1e-5 * float(p.grad.norm()) + 1e-9)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_known_architectures_take_the_fast_way(architecture):
    """Tied, untied, scaled and capped heads are scored in chunks."""
    check(make(architecture), "chunked")


@pytest.mark.parametrize(
    ("architecture", "words"), [("gemma2", "capped at 3"), ("granite", "scaled by 0.125"), ("cohere", "scaled by 0.25")]
)
def test_the_reason_names_scale_and_softcap(architecture, words):
    """The reason names a scale or a softcap."""
    assert words in choose_head(make(architecture), device=CPU).reason


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Squashed, "logits are not"),
        (Terse, "logits are not"),
        (Twice, "2 times"),
        (Last, "fed [1, 1, 16] for a row of 4"),
        (Counting, "needs all rows"),
        (Turned, "logits are not"),
    ],
)
def test_unknown_heads_fall_back(kind, words):
    """What the config does not name is found by running the model, which then scores itself.
    Even with logits too small to show it.
    """
    check(unusual_model(kind), "logits", words=words, **({"logits_to_keep": 0} if kind is Last else {}))


def test_the_heads_input_is_scored():
    """A model that changes hidden states before its head is scored on those, with its weight."""
    check(unusual_model(Detour), "chunked")


def test_a_lora_head_falls_back_before_it_learns():
    """An adapter on the head is scored by the model.
    It adds nothing at first, so logits agree; the layer's class decides.
    """
    model = adapt(make("llama-untied"), AdapterSettings(adapter="lora", target_modules=("lm_head", "q_proj"))).model
    check(model, "logits", words="no plain linear layer")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter))
    check(model, "logits")


def test_a_trained_copy_of_the_head_falls_back():
    """A trained copy of the head (PEFT's modules_to_save) is scored by the model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(make("llama-untied"), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.1)
    check(model, "logits", words="no plain linear layer")


def test_lora_elsewhere_takes_the_fast_way():
    """Adapters in the decoder leave the head plain, scored in chunks."""
    model = adapt(make("llama-tied"), AdapterSettings(adapter="lora")).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    check(model, "chunked")


def test_a_hook_that_changes_logits_falls_back():
    """A hook that changes the head's output is no scale of the config: the model scores itself."""
    model = make()
    model.lm_head.register_forward_hook(lambda _module, _args, out: out * 2)
    check(model, "logits", words="logits are not")


def test_a_hook_that_changes_the_heads_input_is_seen():
    """A hook that changes the head's input acts on the loss, computed inside the head's call."""
    model = make()
    model.lm_head.register_forward_pre_hook(lambda _module, args: (args[0] * 1.5,))
    check(model, "chunked")


def test_a_replaced_forward_of_the_head_falls_back():
    """A head whose forward was replaced (as accelerate does) keeps it; the model scores itself."""
    model = make()
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden) * 2
    check(model, "logits", words="no plain linear layer")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_bits_as_decoder_and_loss(architecture):
    """Loss and gradients are those of decoder then chunked loss, to the bit."""
    model = make(architecture)
    head = choose_head(model, device=CPU)
    inputs = packed_inputs(torch.arange(7, 14), torch.arange(7), torch.tensor([0, 7]), 7)
    rows, targets = torch.tensor([1, 2, 5]), torch.tensor([9, 3, 60])
    found = []
    for run in ("head", "parts"):
        model.zero_grad()
        if run == "head":
            terms = head.nll(inputs, rows, targets)
        else:
            hidden = model.model(**inputs).last_hidden_state[0].index_select(0, rows)
            terms = nll(hidden, model.lm_head.weight, targets, scale=head.scale, softcap=head.softcap)
        (terms.sum / 7).backward()
        found.append((terms.sum.detach(), [p.grad for p in model.parameters()]))
    (loss, mine), (expected, theirs) = found
    assert torch.equal(loss, expected)
    assert all(torch.equal(m, t) for m, t in zip(mine, theirs, strict=True))


class Sharded:
    """A head whose weight exists during its own call and from its output's gradient on.
    As where it is divided over ranks.
    """

    def __init__(self, head):
        self.weight, self.whole, self.log = head.weight, head.weight.data, []
        head.register_forward_pre_hook(self.gather)
        head.register_forward_hook(self.after)
        self.free()

    def free(self):
        self.weight.data = torch.full((), torch.nan).expand(self.whole.shape)

    def gather(self, _module, _args):
        self.weight.data = self.whole

    def after(self, _module, _args, out):
        self.free()
        if out.requires_grad:
            out.register_hook(self.before_backward)

    def before_backward(self, _grad):
        self.log.append("head")
        self.weight.data = self.whole

    def root(self, _module, _args, out):
        if out.logits.requires_grad:
            out.logits.register_hook(lambda _grad: self.log.append("root"))


@pytest.mark.parametrize(
    "loss",
    [
        lambda head, *asked: head.nll(*asked).sum,
        lambda head, *asked: head.logps(*asked).square().sum(),
        lambda head, *asked: head.logps(*asked, beside=lambda hidden: hidden @ head.model.lm_head.weight[0])[1].sum(),
    ],
    ids=["nll", "logps", "beside"],
)
def test_the_weight_is_used_inside_the_heads_call_only(loss):
    """Probe, loss and gradients are right where the weight is invalid outside the head's call.
    Until the gradient of its output comes.
    """
    expected, model = make("llama-untied"), make("llama-untied")
    sharded = Sharded(model.lm_head)
    model.register_forward_hook(sharded.root)
    model.model.norm.weight.register_hook(lambda _grad: sharded.log.append("below"))
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda _p: sharded.log.append("weight"))
    inputs = packed_inputs(torch.arange(7, 14), torch.arange(7), torch.tensor([0, 7]), 7)
    rows, targets = torch.tensor([1, 2, 5]), torch.tensor([9, 3, 60])
    found = []
    for each in (expected, model):
        head = choose_head(each, device=CPU)
        assert head.name == "chunked", head.reason
        value = loss(head, inputs, rows, targets)
        value.backward()
        found.append((value.detach(), [p.grad for p in each.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(m, t) for m, t in zip(found[0][1], found[1][1], strict=True))
    assert set(sharded.log[:2]) == {"root", "head"}
    assert set(sharded.log[2:]) == {"below", "weight"}


def test_the_head_is_as_before():
    """After a forward, and after one that failed, the head has its class's forward."""
    model = make()
    head = choose_head(model, device=CPU)
    inputs = packed_inputs(torch.arange(7), torch.arange(7), torch.tensor([0, 7]), 7)
    head.nll(inputs, torch.tensor([1]), torch.tensor([3]))
    assert "forward" not in vars(model.lm_head)
    with pytest.raises(IndexError):
        head.nll(inputs, torch.tensor([99]), torch.tensor([3]))
    assert "forward" not in vars(model.lm_head)


def test_the_probe_leaves_no_trace():
    """Random state, modes, gradients and hooks are as before the probe.
    Modes that were set by hand too, and with dropout in the model.
    """
    model = make()
    model.config.attention_dropout = 0.5
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    model(input_ids=torch.arange(5)[None], use_cache=False).logits.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    choose_head(model, device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert not model.lm_head._forward_pre_hooks


def test_bfloat16_models_take_the_fast_way_too():
    """bfloat16 models are scored in chunks too: the probe allows for its rounding."""
    assert choose_head(make("granite").bfloat16(), device=CPU).name == "chunked"
    assert choose_head(unusual_model(Squashed).bfloat16(), device=CPU).name == "logits"
