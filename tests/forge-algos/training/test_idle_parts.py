"""Weights beside the language part: gradients of zero where a row has no images, and what no image reaches."""

import numpy as np
import pytest
import torch
import transformers

from forge_algos import (
    SFT,
    AdapterSettings,
    MediaDocument,
    OptimizerSettings,
    Rehearsal,
    adapt,
    make_optimizer,
    schedule,
    train,
    unreached_by_media,
)

IMAGE = 60


def model(seed=0):
    """A tiny LLaVA that reads the first of two layers of its tower."""
    torch.manual_seed(seed)
    text = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config={**text, "model_type": "llama"},
        vision_config={**vision, "image_size": 28, "patch_size": 14, "model_type": "clip_vision_model"},
        image_token_index=IMAGE,
        vision_feature_layer=-2,
    )
    return transformers.LlavaForConditionalGeneration(config)


PIXELS = {"pixel_values": np.random.default_rng(0).normal(size=(1, 3, 28, 28)).astype(np.float32)}
IDS = np.array([5, IMAGE, IMAGE, IMAGE, IMAGE, 7, 8, 9], dtype=np.int32)


class Row:
    """A packed row of one document."""

    def __init__(self, ids, images=None):
        self.input_ids, self.position_ids = ids, np.arange(len(ids), dtype=np.int32)
        self.labels = np.where(self.position_ids > 4, ids, -100).astype(np.int32)
        self.cu_seqlens = np.array([0, len(ids)], dtype=np.int32)
        self.max_seqlen, self.weights = len(ids), None
        if images is not None:
            self.media_inputs = lambda: [images]


def steps(net, rows, **more):
    optimizer = make_optimizer(net, OptimizerSettings(learning_rate=1e-2, weight_decay=0.1))
    plan = schedule(optimizer, OptimizerSettings(lr_scheduler="constant"), num_steps=len(rows))
    return list(train(net, rows, objective=SFT(), optimizer=optimizer, scheduler=plan, max_grad_norm=0, **more))


def test_a_row_without_images_gives_zeros():
    """Each weight of tower and projector has a gradient after it, that of a row with images to the bit where both come."""
    text, image = Row(np.arange(1, 9, dtype=np.int32)), Row(IDS, PIXELS)
    net = model()
    steps(net, [[text]])
    beside = {name: p for name, p in net.named_parameters() if "vision_tower" in name or "projector" in name}
    assert all(p.grad is not None and not p.grad.any() for p in beside.values())
    found = []
    for rows in ([image, text], [text, image]):
        net = model()
        steps(net, [rows])
        found.append({name: p.grad for name, p in net.named_parameters() if name in beside})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name
    assert any(gradient.any() for gradient in found[0].values())


def mllama(seed=0):
    """A tiny Llama 3.2 Vision, which runs its tower before the embeddings, and a layer on images alone."""
    torch.manual_seed(seed)
    text = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}
    tiles = {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]], "image_size": 28, "patch_size": 14}
    config = transformers.MllamaConfig(
        text_config={**text, "num_key_value_heads": 2, "cross_attention_layers": [1], "pad_token_id": 0},
        vision_config={**tower, **tiles, "vision_output_dim": 16, "intermediate_layers_indices": [0]},
        image_token_index=IMAGE,
    )
    return transformers.MllamaForConditionalGeneration(config)


ONE_TILE = {
    "pixel_values": PIXELS["pixel_values"][None, None],
    "aspect_ratio_ids": np.ones((1, 1), np.int64),
    "aspect_ratio_mask": np.ones((1, 1, 1), np.int64),
    "cross_attention_mask": np.ones((1, len(IDS), 1, 1), np.int64),
}


@pytest.mark.parametrize(("make", "images"), [(model, PIXELS), (mllama, ONE_TILE)])
def test_gradients_are_complete_in_the_same_order(make, images):
    """Ranks whose rows have images or not sum the same weights at a time, as ZeRO does while a backward pass goes on."""
    orders = []
    for row in (Row(np.arange(1, 9, dtype=np.int32)), Row(IDS, images)):
        net, order = make(), []
        names = {parameter: name for name, parameter in net.named_parameters()}
        for parameter in names:
            parameter.register_post_accumulate_grad_hook(order.append)
        steps(net, [[row]], media=True)
        order = [names[parameter] for parameter in order]
        assert sorted(order) == sorted(names.values())
        orders.append(order)
    assert orders[0] == orders[1]


def test_layers_of_images_without_images():
    """Where no row has images they have no gradient: an optimizer passes them over, and they stay as they are."""
    net = mllama()
    steps(net, [[Row(np.arange(1, 9, dtype=np.int32))]])
    idle = [p for name, p in net.named_parameters() if "language_model.layers.1." in name]
    assert idle
    assert all(p.grad is None for p in idle)


def test_no_weight_beside_the_language_part():
    """Where none trains nothing is added: a frozen tower has no gradients."""
    net = model()
    for name, p in net.named_parameters():
        p.requires_grad = "language_model" in name or "lm_head" in name
    steps(net, [[Row(np.arange(1, 9, dtype=np.int32))]])
    assert all(p.grad is None for p in net.parameters() if not p.requires_grad)


def test_the_language_part_alone_is_frozen():
    """The projector alone trains, and a step without images is made too."""
    net = model()
    for name, p in net.named_parameters():
        p.requires_grad = "projector" in name
    adapted = adapt(net, AdapterSettings(), language=False).model
    found = steps(adapted, [[Row(np.arange(1, 9, dtype=np.int32))], [Row(IDS, PIXELS)]])
    assert found[0].grad_norm == 0 < found[1].grad_norm


def test_what_no_image_reaches():
    """The last layer of the tower and the norm behind it; the same in a rehearsal, without numbers."""
    net = model()
    document = MediaDocument(IDS, PIXELS, [(1, 5)])
    found = unreached_by_media(net, document, device=torch.device("cpu"))
    assert found
    assert all(".layers.1." in name or ".post_layernorm." in name for name in found)
    assert any(".layers.1." in name for name in found)
    assert all(p.grad is None for p in net.parameters())
    with torch.device("meta"):
        outline = model()
    rehearsal = Rehearsal(device=torch.device("cpu"))
    placed = rehearsal.placed(rehearsal.model(outline, None))
    assert rehearsal.unreached(placed, document) == found


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ({}, {"language_model"}),
        ({"beside": ["model.vision_tower"]}, {"language_model", "vision_tower"}),
        ({"beside": ["model.multi_modal_projector"], "language": False}, {"multi_modal_projector"}),
    ],
)
def test_where_adapters_are_put(how, parts):
    """Into the parts that are named, the language part alone by default."""
    adapted = adapt(model(), AdapterSettings(adapter="lora", lora_r=2), **how).model
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    known = ("language_model", "vision_tower", "multi_modal_projector")
    assert {part for name in trained for part in known if f".{part}." in name} == parts
