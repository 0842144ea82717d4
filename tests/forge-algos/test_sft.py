"""SFT on a packed row equals one sample at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from forge_algos import SFT, AdapterError, AdapterSettings, PackedBatchError, attach_lora

from .oracle import ARCHITECTURES, CPU, distance, gradients, make, naive, pack, samples, worst

LENGTHS = (5, 1, 9, 2, 7, 13)


def both(model, examples):
    """((loss, gradients) packed, (loss, gradients) one by one)."""
    model.zero_grad()
    terms = SFT().bind(model, device=CPU)(pack(examples))
    terms.sum.backward()
    ours = terms.sum.item(), gradients(model)
    model.zero_grad()
    total, count = naive(model, examples)
    total.backward()
    assert terms.count == count == SFT().count(pack(examples))
    return ours, (total.item(), gradients(model))


@pytest.mark.parametrize(
    ("architecture", "attention"), [(a, w) for a in ARCHITECTURES for w in ("sdpa", "eager") if (a, w) != ("gemma2", "sdpa")]
)
def test_equals_one_sample_at_a_time(architecture, attention):
    """Loss within 1e-6 and gradients within 1e-5, with masks that do not start with -100, a sample of one token among them."""
    model = make(architecture, attention=attention)
    (loss, mine), (expected, theirs) = both(model, samples(LENGTHS))
    assert abs(loss / expected - 1) < 1e-6
    assert distance(mine, theirs) < 1e-5
    assert worst(mine, theirs) < 1e-4


def test_lora_equals_one_sample_at_a_time():
    """The same with adapters that have learned something; the frozen base gets no gradient."""
    model = attach_lora(make(), AdapterSettings(adapter="lora", lora_r=3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    (loss, mine), (expected, theirs) = both(model, samples(LENGTHS))
    assert abs(loss / expected - 1) < 1e-6
    assert distance(mine, theirs) < 1e-5
    assert all("lora" in name for name in mine)


def test_no_target_crosses_a_border():
    """The last token of a document predicts nothing, even where the next document's first label is set."""
    examples = [(np.array([5, 6]), np.array([5, -100])), (np.array([7, 8]), np.array([7, 8]))]
    assert SFT().count(pack(examples)) == 1


def test_the_count_of_nothing():
    """An empty row and a fully masked one have no terms."""
    assert SFT().count(pack([])) == 0
    assert SFT().count(pack(samples([4, 3], learned=0.0))) == 0


def test_attention_is_told_where_documents_begin():
    """Variable-length attention gets int32 boundaries and plain ints, and no mask."""
    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append((attention_mask, kwargs))
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", lambda *_args, **_kwargs: None)
    model = make(attention="spy")
    terms_of = SFT().bind(model, device=CPU)
    seen.clear()
    terms_of(pack(samples(LENGTHS)))
    mask, kwargs = seen[0]
    assert mask is None
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert kwargs[name].dtype == torch.int32
        assert kwargs[name].tolist() == [0, *np.cumsum(LENGTHS)]
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 13
    assert type(kwargs["max_length_q"]) is int


def test_read_only_arrays_are_welcome():
    """Rows may be views of a file: they are copied, without a warning, and not written to."""
    batch = pack(samples([4, 3]))
    for array in vars(batch).values():
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    narrow = SimpleNamespace(**{**vars(batch), "input_ids": batch.input_ids.astype(np.int32)})
    assert SFT().bind(make(), device=CPU)(narrow).sum.isfinite()


def test_ids_outside_of_the_vocabulary_are_named():
    """An id that the model does not have is an error with that id, not an index error inside a kernel."""
    batch = pack(samples([4, 3]))
    batch.input_ids[2] = 61
    with pytest.raises(PackedBatchError, match="input_ids holds the token id 61.*ends at 60"):
        SFT().bind(make(), device=CPU)(batch)


def test_virtual_tokens_are_refused():
    """Prompt-like adapters put tokens of no document into the row."""
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(make(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(AdapterError, match="virtual tokens"):
        SFT().bind(model, device=CPU)
