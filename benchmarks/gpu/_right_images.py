"""Rows with images: packed beside one document a forward, on a small Qwen3-VL with random weights."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from _here import Here, check, packed

_IMAGE, _START, _END = 500, 501, 502
"""Token ids of images; text has none of them."""


@check("right")
def images(here: Here) -> tuple[bool, dict[str, Any]]:
    """Compare a packed row with images in bf16 with documents alone in float32; bf16 on documents alone is the yardstick."""
    from forge_algos import MediaDocument, OptimizerSettings, pack_media, require_image_attention

    torch = here.torch
    documents = [_document(tokens, grid, seed) for seed, (tokens, grid) in enumerate(_sizes(here))]
    shown = [MediaDocument(each.input_ids, each.inputs, [each.span]) for each in documents if each.inputs]
    count = sum(int((each.labels[1:] != -100).sum()) for each in documents)

    def alone(context: Any) -> tuple[float, Any]:
        model, total = _model(here, "eager"), 0.0
        for each in documents:
            given = {name: torch.tensor(array, device=here.device) for name, array in each.inputs.items()}
            ids, labels = (torch.tensor(array, device=here.device) for array in (each.input_ids, each.labels))
            with context:
                logits = model(input_ids=ids[None], use_cache=False, **given).logits[0]
            loss = (
                torch.nn.functional.cross_entropy(logits.float()[:-1], labels[1:], ignore_index=-100, reduction="sum") / count
            )
            loss.backward()
            total += float(loss)
        return total, _gradient(model)

    def together(**how: Any) -> tuple[float, Any, str]:
        model = _model(here, "documents")
        autocast = how.get("autocast", here.autocast)
        require_image_attention(model, shown[0], device=here.device, autocast=autocast)
        packs, why = pack_media(model, shown, device=here.device, autocast=autocast)
        rows = [documents] if packs else [[each] for each in documents]
        still = OptimizerSettings(learning_rate=1e-12, lr_scheduler="constant")
        out = next(here.train(model, [[_row(each) for each in rows]], settings=still, max_grad_norm=0.0, **how))
        return out.loss, _gradient(model), "" if packs else why

    exact, coarse = alone(nullcontext()), alone(here.autocast())
    fine, trained = together(autocast=nullcontext), together()
    facts: dict[str, Any] = {"tokens": sum(len(each.input_ids) for each in documents), "why_not": fine[2] or trained[2]}
    for name, (loss, gradient, *_) in {"bf16_alone": coarse, "packed_float32": fine, "packed_bf16": trained}.items():
        facts[f"{name}_loss"] = abs(loss / exact[0] - 1)
        facts[f"{name}_gradient"] = float((gradient - exact[1]).norm() / exact[1].norm())
    good = facts["packed_float32_loss"] < 1e-4 and facts["packed_float32_gradient"] < 1e-2
    good &= facts["packed_bf16_gradient"] < max(2 * facts["bf16_alone_gradient"], 1e-2)
    return good and not facts["why_not"], facts


def _sizes(here: Here) -> list[tuple[int, tuple[int, int]]]:
    """Return the words of each document, and the grid of its image; (0, 0) is none."""
    if here.toy:
        return [(7, (2, 4)), (40, (4, 4)), (23, (0, 0)), (9, (6, 2))]
    return [(37, (16, 24)), (400, (32, 32)), (129, (0, 0)), (64, (8, 40))]


def _document(tokens: int, grid: tuple[int, int], seed: int) -> Any:
    import numpy as np

    draw, (height, width) = np.random.default_rng(seed), grid
    number, words = height * width // 4, draw.integers(5, 400, tokens)
    image = np.array([_START, *[_IMAGE] * number, _END] if number else [], dtype=np.int64)
    ids = np.concatenate([words[:3], image, words[3:]])
    inputs = {}
    if number:
        pixels = draw.standard_normal((height * width, 3 * 2 * 14 * 14)).astype(np.float32)
        types = (ids == _IMAGE).astype(np.int64)[None]
        inputs = {"pixel_values": pixels, "image_grid_thw": np.array([[1, height, width]]), "mm_token_type_ids": types}
    labels = np.where(np.arange(len(ids)) >= len(ids) - tokens // 2, ids, -100)
    return SimpleNamespace(input_ids=ids, labels=labels, inputs=inputs, span=(3, 3 + len(image)))


def _row(documents: list[Any]) -> Any:
    row = packed(documents)
    of_media = (lambda: [each.inputs for each in documents]) if any(each.inputs for each in documents) else None
    return SimpleNamespace(**{name: getattr(row, name) for name in _ARRAYS}, media_inputs=of_media)


_ARRAYS = ("input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "weights")


def _model(here: Here, attention: str) -> Any:
    from transformers import AutoModelForMultimodalLM, Qwen3VLConfig

    from forge_dist.loading._attention import register_attention
    from forge_dist.loading._modalities import attend_plainly

    torch, shape = here.torch, {**here.shape("small"), "vocab_size": 512}
    torch.manual_seed(0)
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 14}
    config = Qwen3VLConfig(
        text_config=shape
        | {"rope_parameters": {"rope_type": "default", "mrope_section": _sections(shape), "mrope_interleaved": True}},
        vision_config={**vision, "out_hidden_size": shape["hidden_size"], "deepstack_visual_indexes": [0]},
        image_token_id=_IMAGE,
        vision_start_token_id=_START,
        vision_end_token_id=_END,
        video_token_id=_END + 1,
    )
    model: Any = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").to(here.device)
    model.requires_grad_(requires_grad=False)
    for part in (model.get_decoder(), model.get_output_embeddings()):
        part.requires_grad_(requires_grad=True)
    if attention != "eager":
        chosen = here.machine.attention(attention, torch.float32).value
        register_attention(chosen.name, chosen.function)
        model.set_attn_implementation(chosen.name)
        attend_plainly(model)
    return model.train()


def _sections(shape: dict[str, Any]) -> list[int]:
    """Divide half of a head's width between time, height and width, as Qwen3-VL does."""
    half = shape["head_dim"] // 2
    return [half - 2 * (half * 3 // 10), half * 3 // 10, half * 3 // 10]


def _gradient(model: Any) -> Any:
    import torch

    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
