"""The loss that an export is checked by."""

import pytest
import torch

from forge_dist.verifying._loss import has_learned_token, inference_mode, score

CPU = torch.device("cpu")


def naive(model, samples):
    """Sum of -log p of each label given what stands before it, position by position."""
    total, count = 0.0, 0
    for input_ids, labels in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([input_ids]), use_cache=False).logits[0].double()
        for t in range(1, len(labels)):
            if labels[t] != -100:
                total -= torch.log_softmax(logits[t - 1], dim=-1)[labels[t]].item()
                count += 1
    return total, count


def test_equals_the_naive_sum(make_model, architecture, samples):
    """Sum and count are those of a loop over positions; the first label of a sample never counts."""
    model = make_model(architecture)
    found = score(model, samples, CPU)
    nll, count = naive(model, samples)
    assert found.count == count == 15
    assert found.total == pytest.approx(nll, rel=1e-6)
    assert found.mean == found.total / 15


def test_equals_transformers(make_model, samples):
    """For one sample the mean is the loss that transformers itself gives."""
    model = make_model("qwen3")
    for input_ids, labels in samples:
        expected = model(input_ids=torch.tensor([input_ids]), labels=torch.tensor([labels]), use_cache=False).loss.item()
        assert score(model, [(input_ids, labels)], CPU).mean == pytest.approx(expected, rel=1e-6)


def test_a_model_that_scores_every_position(make_model, samples):
    """An architecture without logits_to_keep gives the same numbers."""
    model = make_model("llama-tied")
    expected = score(model, samples, CPU)

    class Plain(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            return model(input_ids=input_ids, use_cache=use_cache)

    assert score(Plain(), samples, CPU).total == pytest.approx(expected.total, rel=1e-6)


@pytest.mark.parametrize("kind", ["tensor", "int32 tensor", "tuple", "numpy", "read-only memory map"])
def test_samples_of_any_kind(make_model, samples, tmp_path, kind):
    """Lists, tensors, numpy arrays and what a token store maps from disk mean the same, without a warning."""
    numpy = pytest.importorskip("numpy", reason="numpy is no dependency of forge-dist") if kind[0] in "nr" else None
    model = make_model("llama-tied")
    expected = score(model, samples[:1], CPU)

    def convert(values):
        if numpy is None:
            return {"tensor": torch.tensor, "tuple": tuple}.get(kind, lambda v: torch.tensor(v, dtype=torch.int32))(values)
        array = numpy.asarray(values, dtype=numpy.int32)
        if kind == "numpy":
            return array
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
        array.tofile(file)
        return numpy.memmap(file, dtype=numpy.int32, mode="r")

    assert score(model, [tuple(map(convert, samples[0]))], CPU) == expected


@pytest.mark.parametrize(
    ("labels", "learned"), [([-100, 5], True), ([5, -100], False), ([5], False), ([], False), ([-100, -100, 0], True)]
)
def test_what_counts_as_learned(labels, learned):
    """A label counts if it is not -100 and something stands before it."""
    assert has_learned_token(labels) is learned


def test_modes_and_attention_come_back(make_model):
    """Inside all modules are in eval mode and on the given attention; afterwards each is as it was, even if the body raises."""
    model = make_model("llama-tied").train()
    model.model.norm.eval()
    with pytest.raises(RuntimeError, match="body"), inference_mode(model, model, "eager"):
        assert not any(module.training for module in model.modules())
        assert model.config._attn_implementation == "eager"
        raise RuntimeError("body")
    assert model.config._attn_implementation == "sdpa"
    assert [name for name, module in model.named_modules() if not module.training] == ["model.norm"]


def test_parts_beside_the_language_keep_their_attention():
    """A tower that sees a whole image is not given the language part's attention, neither for the check nor after it."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**small, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 16}
    text = {**small, "model_type": "llama", "vocab_size": 32, "num_key_value_heads": 2}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=31)
    model = transformers.LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"": "eager", "text_config": "eager", "vision_config": "sdpa"})

    def attentions():
        parts = (model.config, model.config.text_config, model.config.vision_config)
        return [part._attn_implementation for part in parts]

    with inference_mode(model, model, "sdpa"):
        assert attentions() == ["sdpa"] * 3
    assert attentions() == ["eager", "eager", "sdpa"]
