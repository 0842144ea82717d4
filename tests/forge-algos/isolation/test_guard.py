"""A packed row beside a cache or a 2-D mask is refused."""

import pytest
import torch

from forge_algos import AdapterSettings, PackedBatchError, adapt, guard_packed

from ..oracle import make

IDS = torch.arange(5, 12)[None]
RESTART = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
BOUNDARIES = torch.tensor([0, 3, 7], dtype=torch.int32)
PACKED = [{"position_ids": RESTART}, {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES}]


@pytest.fixture(scope="module")
def model():
    return make().eval()


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "left at its default, True"),
        ({"use_cache": None}, "left at its default, True"),
        ({"use_cache": True}, "use_cache=True"),
        ({"use_cache": False, "attention_mask": torch.ones(1, 7)}, r"2-D attention_mask \[1, 7\]"),
    ],
)
def test_what_mixes_documents_is_refused(model, packed, wrong, message):
    """Default or explicit cache and all-ones mask are refused, on the model and its decoder.
    Rows are recognised by positions or by boundaries.
    """
    with guard_packed(model):
        for module in (model, model.model):
            with pytest.raises(PackedBatchError, match=message):
                module(input_ids=IDS, **packed, **wrong)


def test_a_mask_by_position_is_seen(model):
    """A mask as a positional argument is seen."""
    with guard_packed(model), pytest.raises(PackedBatchError, match="2-D"):
        model(IDS, torch.ones(1, 7), RESTART, use_cache=False)


def test_what_is_refused_would_have_mixed(model):
    """With the cache the second document's logits are others; without it they are its own."""
    alone = model(input_ids=IDS[:, 3:], use_cache=False).logits
    with guard_packed(model):
        packed = model(input_ids=IDS, position_ids=RESTART, use_cache=False).logits[:, 3:]
    mixed = model(input_ids=IDS, position_ids=RESTART).logits[:, 3:]
    assert (packed - alone).abs().max() < 1e-5
    assert (mixed - alone).abs().max() > 1e-2


@pytest.mark.parametrize(
    "fine",
    [
        {"position_ids": RESTART, "use_cache": False},
        {"cu_seq_lens_q": BOUNDARIES, "position_ids": RESTART, "use_cache": False},
        {"position_ids": RESTART, "use_cache": False, "attention_mask": torch.ones(1, 1, 7, 7, dtype=torch.bool)},
        {},
        {"position_ids": torch.arange(7)[None], "attention_mask": torch.ones(1, 7)},
        {"cu_seq_lens_q": torch.tensor([0, 7], dtype=torch.int32)},
    ],
)
def test_valid_calls_pass(model, fine):
    """Rows without cache and mask, with a mask of their own blocks, or not packed pass."""
    with guard_packed(model):
        assert model(input_ids=IDS, **fine).logits.isfinite().all()


def test_generation_passes(model):
    """Padded batches with a cache, as `generate` makes them, pass."""
    ids = torch.tensor([[0, 0, 5, 6], [5, 6, 7, 8]])
    with guard_packed(model):
        out = model.generate(
            input_ids=ids, attention_mask=(ids > 0).long(), max_new_tokens=3, min_new_tokens=3, do_sample=False
        )
    assert out.shape == (2, 7)


def test_a_config_without_cache_passes():
    """With use_cache=False in the config the default passes."""
    model = make()
    model.config.use_cache = False
    with guard_packed(model):
        assert model(input_ids=IDS, position_ids=RESTART).logits.isfinite().all()


def test_the_guard_is_removed(model):
    """`remove` takes every hook off, and may be called again."""
    guard = guard_packed(model)
    guard.remove()
    guard.remove()
    model(input_ids=IDS, position_ids=RESTART)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_adapters_are_guarded_too():
    """The guard acts through PEFT's wrapper as well as through the model inside it."""
    model = adapt(make(), AdapterSettings(adapter="lora")).model
    with guard_packed(model):
        for module in (model, model.get_base_model()):
            with pytest.raises(PackedBatchError):
                module(input_ids=IDS, position_ids=RESTART)
