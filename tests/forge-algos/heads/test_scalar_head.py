"""Scores of positions in a packed row are the classifier's for each document alone."""

import pytest
import torch
import transformers

from forge_algos import LossError
from forge_algos.batches._packed import packed_inputs
from forge_algos.isolation._isolation import require_isolation
from forge_algos.objectives import choose_scalar_head

from ..oracle import CPU, SIZES, make

KINDS = ("Llama", "Qwen3", "Gemma2", "Mistral")
LENGTHS = (4, 1, 6)


def classifier(kind="Llama", *, labels=1, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more}, num_labels=labels)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def packed():
    """Return (the forward's arguments, documents, the position of each one's last token).
    The last document ends with the padding's id.
    """
    ids = (torch.arange(sum(LENGTHS)) * 7 + 3) % 61
    ids[-1] = 0
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0)
    return packed_inputs(ids, positions, boundaries, max(LENGTHS)), ids.split(list(LENGTHS)), boundaries[1:] - 1


def gradients(model, value):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(value, trained)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_each_document_alone(kind):
    """Values and gradients of any positions, in any order and repeated, equal single documents'.
    With the padding's id in the row.
    """
    model = classifier(kind, pad_token_id=None) if kind == "Llama" else classifier(kind)
    require_isolation(model, device=CPU)
    inputs, documents, ends = packed()
    order = [2, 0, 1, 0]
    scores = choose_scalar_head(model, device=CPU).scores(inputs, ends[order])
    assert scores.dtype == torch.float32
    model.config.pad_token_id = None
    expected = torch.stack([model(input_ids=documents[i][None], use_cache=False).logits[0, 0] for i in order])
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
    ours, theirs = (gradients(model, (value.sin() * weights).sum()) for value in (scores, expected))
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5 * float(wanted.norm()) + 1e-8)


def test_a_trained_copy_of_the_score_is_used():
    """PEFT's trained copy of `score` (modules_to_save) scores and learns, not the original."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], modules_to_save=["score"])
    model = get_peft_model(classifier(), config)
    copy = model.base_model.model.score.modules_to_save["default"]
    with torch.no_grad():
        copy.weight.mul_(-3)
    inputs, documents, ends = packed()
    head = choose_scalar_head(model, device=CPU)
    scores = head.scores(inputs, ends)
    model.config.pad_token_id = None
    expected = torch.stack([model(input_ids=document[None]).logits[0, 0] for document in documents])
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    scores.sum().backward()
    assert copy.weight.grad.abs().max() > 0
    assert "forward" not in vars(model.base_model.model.score)


def test_no_rows():
    """Without rows the result is empty, and every gradient exists and is zero."""
    model = classifier()
    inputs, _, ends = packed()
    scores = choose_scalar_head(model, device=CPU).scores(inputs, ends[:0])
    assert scores.shape == (0,)
    assert all(not gradient.any() for gradient in gradients(model, scores.sum()))


def test_bfloat16_scores_are_float32():
    """Scores are float32, because their differences are compared."""
    model = classifier().bfloat16()
    inputs, _, ends = packed()
    assert choose_scalar_head(model, device=CPU).scores(inputs, ends).dtype == torch.float32


def test_the_probe_leaves_no_trace():
    """Random state, modes, gradients and the layer are as before, with dropout in the model."""
    model = classifier(attention_dropout=0.5)
    model.model.layers[0].eval()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    choose_scalar_head(model, device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in vars(model.score)


class Squashed(transformers.LlamaForSequenceClassification):
    """A reward between -1 and 1."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.tanh()
        return out


class First(transformers.LlamaForSequenceClassification):
    """A model that reads the first token."""

    def forward(self, input_ids, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(logits=self.score(hidden[:, :1])[:, 0])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: make(), "LlamaForCausalLM has no layer `score`"),
        (lambda: classifier(labels=3), "gives a sequence 3 numbers and not one: load it with .* num_labels=1"),
        (lambda: Squashed(transformers.LlamaConfig(**SIZES, num_labels=1)), "not the last one"),
        (lambda: First(transformers.LlamaConfig(**SIZES, num_labels=1)), "fed .* for a row of 3 tokens"),
    ],
)
def test_other_models_are_refused(model, words):
    """Models that are no classifier with one label are refused by name, with what to do.
    So are those that do more than their layer.
    """
    with pytest.raises(LossError, match=words):
        choose_scalar_head(model(), device=CPU)
