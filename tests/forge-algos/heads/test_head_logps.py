"""One forward of a head: log-probabilities, likelihoods, values and divergences.
All are the model's own, scored in chunks or by the model.
"""

import pytest
import torch

from forge_algos import AdapterSettings, LossError, adapt
from forge_algos._modules import decoder
from forge_algos.batches._packed import packed_inputs
from forge_algos.losses import distillation
from forge_algos.objectives import choose_head

from ..losses.test_nll import Largest
from ..oracle import ARCHITECTURES, CPU, make
from .test_head import Last, Squashed, Terse, Turned, unusual_model


def scored_rows():
    """Return (the forward's arguments, rows with one of them twice, their targets)."""
    inputs = packed_inputs(torch.arange(7, 14), torch.tensor([0, 1, 2, 0, 1, 2, 3]), torch.tensor([0, 3, 7]), 4)
    return inputs, torch.tensor([1, 2, 2, 5]), torch.tensor([9, 3, 60, 4])


def logits_of(model, inputs, rows):
    """Return all of the model's logits, in float32."""
    keep = {"logits_to_keep": 0} if isinstance(model, Last) else {}
    return model(**inputs, **keep).logits[0].float()[rows]


def gradients_of(model, value):
    """Return the gradients of the trained parameters, as one vector."""
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(value, trained, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(trained, found, strict=True)])


def same_gradients(model, ours, theirs):
    mine, wanted = gradients_of(model, ours), gradients_of(model, theirs)
    assert float((mine - wanted).norm() / wanted.norm()) < 2e-5


def lora_on_the_head():
    model = adapt(make("llama-untied"), AdapterSettings(adapter="lora", target_modules=("lm_head", "q_proj"))).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter))
    return model


def biased():
    model = make("llama-untied")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(61))
    return model


def self_scoring_model(kind, seed=0):
    """Return a model that scores itself, with weights large enough to change its loss."""
    model = unusual_model(kind)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


MODELS = {
    **{name: lambda name=name: make(name) for name in ARCHITECTURES},
    "biased": biased,
    "squashed": lambda: self_scoring_model(Squashed),
    "terse": lambda: self_scoring_model(Terse),
    "turned": lambda: self_scoring_model(Turned, seed=1),
    "last": lambda: self_scoring_model(Last),
    "lora on the head": lora_on_the_head,
    "lora": lambda: adapt(make(), AdapterSettings(adapter="lora")).model,
}


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_the_models_own(name):
    """Log-probabilities, entropies and gradients are those of log_softmax of the logits.
    At any temperature, scored in chunks or by the model.
    """
    model = MODELS[name]()
    inputs, rows, targets = scored_rows()
    head = choose_head(model, device=CPU)
    logps, entropy = head.logps_and_entropy(inputs, rows, targets, temperature=0.7)
    theirs = (logits_of(model, inputs, rows) / 0.7).log_softmax(1)
    expected = theirs.gather(1, targets[:, None]).squeeze(1)
    assert logps.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(theirs.exp() * theirs).sum(1).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logps(inputs, rows, targets, temperature=0.7), logps, rtol=0, atol=0)
    _, collision = head.logps_and_collision(inputs, rows, targets)
    squares = (2 * logits_of(model, inputs, rows).log_softmax(1)).logsumexp(1)
    torch.testing.assert_close(collision, squares.detach(), rtol=1e-5, atol=1e-5)
    same_gradients(model, logps.square().sum(), expected.square().sum())
    again, learned = head.logps_and_entropy(inputs, rows, targets, temperature=0.7, learned=True)
    assert torch.equal(again, logps)
    assert torch.equal(learned, entropy)
    theirs = (logits_of(model, inputs, rows) / 0.7).log_softmax(1)
    same_gradients(model, learned.square().sum(), (theirs.exp() * theirs).sum(1).square().sum())


@pytest.mark.parametrize("name", ["gemma2", "granite", "biased", "squashed", "lora on the head"])
def test_variants_of_the_likelihood(name):
    """DFT, label smoothing and z-loss reach the loss; the stats count the plain likelihood."""
    model = MODELS[name]()
    inputs, rows, targets = scored_rows()
    terms = choose_head(model, device=CPU).nll(inputs, rows, targets, dft=True, label_smoothing=0.2, z_loss=0.1)
    logits = logits_of(model, inputs, rows)
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    smoothed = torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=0.2)
    expected = ((-plain).exp().detach() * smoothed + 0.1 * logits.logsumexp(1).square()).sum()
    torch.testing.assert_close(terms.sum, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(terms.stats["nll"], plain.sum().detach(), rtol=1e-5, atol=1e-5)
    assert terms.stats["correct"] == (logits.argmax(1) == targets).sum()
    assert (terms.count, set(terms.stats)) == (4, {"correct", "nll"})
    same_gradients(model, terms.sum, expected)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "biased", "squashed", "last", "lora on the head", "lora"])
def test_values_beside_log_probabilities(name):
    """One forward gives log-probabilities and values.
    Gradients run through both into the decoder, and into the value head.
    """
    model = MODELS[name]()
    inputs, rows, targets = scored_rows()
    value_head = torch.nn.Linear(16, 1)
    head, body = choose_head(model, device=CPU), decoder(model)
    calls = []
    handle = body.register_forward_hook(lambda *_: calls.append(1))
    found = head.logps_and_entropy(inputs, rows, targets, beside=lambda hidden: value_head(hidden).squeeze(-1))
    handle.remove()
    assert len(calls) == 1
    logps, _, values = found
    hidden = body(**inputs).last_hidden_state[0]
    expected_values = value_head(hidden).squeeze(-1)
    expected = logits_of(model, inputs, rows).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    same_gradients(value_head, (logps * values[rows]).sum(), (expected * expected_values[rows]).sum())
    logps, values = head.logps(inputs, rows, targets, beside=lambda hidden: value_head(hidden).squeeze(-1))
    expected_values = value_head(body(**inputs).last_hidden_state[0]).squeeze(-1)
    expected = logits_of(model, inputs, rows).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    same_gradients(model, (logps * values[rows]).sum(), (expected * expected_values[rows]).sum())


def test_values_need_hidden_states():
    """A model that does not expose its decoder has no hidden states for values: refused."""

    class Closed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, input_ids, **kwargs):
            return self.inner(input_ids=input_ids, **kwargs)

    inputs, rows, targets = scored_rows()
    head = choose_head(Closed(), device=CPU)
    expected = choose_head(make(), device=CPU).logps(inputs, rows, targets)
    torch.testing.assert_close(head.logps(inputs, rows, targets).detach(), expected.detach())
    with pytest.raises(LossError, match="Closed has no decoder whose hidden states could be read"):
        head.logps(inputs, rows, targets, beside=lambda hidden: hidden[:, 0])


@pytest.mark.parametrize("student", ["llama-tied", "gemma2", "squashed"])
@pytest.mark.parametrize("teacher", ["llama-untied", "granite", "turned"])
def test_distillation_is_that_of_whole_logits(student, teacher):
    """Value, divergence and gradients are those of both models' whole logits.
    Any student with any teacher, scored in chunks or by the model.
    """
    student, teacher = MODELS[student](), MODELS[teacher]().eval().requires_grad_(False)
    inputs, rows, _ = scored_rows()
    heads = [choose_head(model, device=CPU) for model in (student, teacher)]
    terms = heads[0].distillation(inputs, rows, heads[1], inputs, beta=0.3, temperature=1.5)
    ours, theirs = (logits_of(model, inputs, rows) for model in (student, teacher))
    expected = distillation(ours, theirs, beta=0.3, temperature=1.5)
    assert terms.count == 4
    torch.testing.assert_close(terms.sum, expected.sum, rtol=1e-5, atol=1e-6)
    kl = distillation(ours, theirs, beta=0.0, temperature=1.5).sum.detach()
    torch.testing.assert_close(terms.stats["kl"], kl, rtol=1e-5, atol=1e-6)
    same_gradients(student, terms.sum, expected.sum)
    with torch.no_grad():
        quiet = heads[0].distillation(inputs, rows, heads[1], inputs, beta=0.3, temperature=1.5)
    assert not quiet.sum.requires_grad
    torch.testing.assert_close(quiet.sum, terms.sum.detach())


@pytest.mark.parametrize("method", ["nll", "logps", "distillation"])
def test_no_tensor_of_all_rows_and_the_vocabulary(method):
    """A forward and backward of 200 scored rows makes no tensor as large as their logits.
    Neither of the teacher nor of the student.
    """
    model, teacher = make("llama-tied"), make("gemma2").eval().requires_grad_(False)
    heads = [choose_head(each, device=CPU) for each in (model, teacher)]
    ids = torch.arange(60)
    rows = torch.arange(60).repeat(30)
    inputs = packed_inputs(ids, torch.arange(60), torch.tensor([0, 60]), 60)
    with Largest() as seen:
        if method == "distillation":
            heads[0].distillation(inputs, rows, heads[1], inputs, beta=0.5, temperature=1.0).sum.backward()
        elif method == "nll":
            heads[0].nll(inputs, rows, ids.repeat(30)).sum.backward()
        else:
            heads[0].logps(inputs, rows, ids.repeat(30)).square().sum().backward()
    assert seen.numel <= 512 * 61 < len(rows) * 61
