"""Rows with images: losses and gradients are those of plain transformers, one document a forward, packed or not."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForMultimodalLM, Phi4MultimodalConfig, Qwen2_5OmniThinkerConfig

import forge_accel
import forge_algos
import forge_packing
from forge_algos.memory import _fake, _tracker
from forge_dist.loading._attention import register_attention
from forge_dist.loading._modalities import attend_plainly

from . import modalities

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")
TOKEN_TYPES = {"gemma3": "token_type_ids"}
CLIP = (505, 504, 506)
"""Tokens before, of and behind a clip."""


def _qwen_omni() -> Any:
    """Counts images in two dimensions where it is given a mask, by the lengths of clips beside them."""
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "output_dim": 32}
    vision = {"fullatt_block_indexes": [1], "window_size": 56, "depth": 2, "hidden_size": 16, "intermediate_size": 24}
    config = Qwen2_5OmniThinkerConfig(
        text_config={**modalities.TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        vision_config={**vision, "num_heads": 2, "patch_size": 14, "out_hidden_size": 32},
        audio_config={**audio, "num_mel_bins": 16, "max_source_positions": 20, "n_window": 10},
        image_token_index=modalities.IMAGE,
        video_token_index=modalities.VIDEO,
        audio_token_index=CLIP[1],
    )
    for name, token in (("image", modalities.IMAGE), ("video", modalities.VIDEO), ("audio", CLIP[1])):
        setattr(config, f"{name}_token_id", token)
    config.vision_start_token_id, config.vision_end_token_id = modalities.START, modalities.END
    config.audio_start_token_id, config.audio_end_token_id = CLIP[0], CLIP[2]
    return config


CONFIGS = {**modalities.CONFIGS, "qwen2.5-omni": _qwen_omni}


class Document(forge_algos.MediaDocument):
    """A document of a made-up data set; `labels` are those of its last tokens."""

    @property
    def labels(self) -> Any:
        return np.where(np.arange(len(self.input_ids)) >= len(self.input_ids) - 3, self.input_ids, -100)


def document(name: str, images: int, seed: int) -> Document:
    """Ids, images and token types as the family's processor gives them; of Qwen-Omni's a clip and a video too."""
    draw = np.random.default_rng(seed)
    ids: list[int] = []
    pixels, grids, spans = [], [], []
    for _ in range(images):
        ids += draw.integers(5, 400, draw.integers(2, 6)).tolist()
        if name == "gemma3":
            pixels.append(draw.standard_normal((1, 3, 28, 28)))
            number = 4
        else:
            height, width = 2 * draw.integers(1, 4), 2 * draw.integers(1, 3)
            pixels.append(draw.standard_normal((height * width, 3 * 2 * 14 * 14)))
            grids.append([1, height, width])
            number = height * width // 4
        spans.append((len(ids), len(ids) + number + 2))
        ids += [modalities.START, *[modalities.IMAGE] * number, modalities.END]
    inputs = {}
    if images and name == "qwen2.5-omni":
        frames = int(draw.integers(20, 60))
        number = (((frames - 1) // 2 + 1) - 2) // 2 + 1
        spans.append((len(ids), len(ids) + number + 2))
        ids += [CLIP[0], *[CLIP[1]] * number, CLIP[2]]
        heard = (np.arange(60) < frames).astype(np.int64)
        inputs = {
            "input_features": (draw.standard_normal((1, 16, 60)) * heard).astype(np.float32),
            "feature_attention_mask": heard[None],
        }
        # Two moments of a video, whose positions are seconds apart.
        grid, seconds = (2, 2, 4), float(draw.uniform(0.3, 3))
        spans.append((len(ids), len(ids) + 4 + 2))
        ids += [modalities.START, *[modalities.VIDEO] * 4, modalities.END]
        inputs |= {
            "pixel_values_videos": draw.standard_normal((np.prod(grid), 3 * 2 * 14 * 14)).astype(np.float32),
            "video_grid_thw": np.array([grid]),
            "video_second_per_grid": np.array([seconds], np.float32),
        }
    ids += draw.integers(5, 400, draw.integers(4, 9)).tolist()
    if images:
        types = (np.array(ids) == modalities.IMAGE).astype(np.int64)[None]
        inputs |= {"pixel_values": np.concatenate(pixels).astype(np.float32)}
        inputs |= {} if name == "qwen2.5-omni" else {TOKEN_TYPES.get(name, "mm_token_type_ids"): types}
        inputs |= {"image_grid_thw": np.array(grids)} if grids else {}
    return Document(np.array(ids), inputs, spans)


@cache
def documents(name: str) -> list[Document]:
    """One or two images, or none."""
    return [document(name, images, seed) for seed, images in enumerate((1, 2, 0, 1))]


def model(name: str, attention: str) -> Any:
    """A tiny model with fixed weights, of which the language part learns."""
    torch.manual_seed(20)
    made: Any = AutoModelForMultimodalLM.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    if attention == "documents":
        chosen = forge_accel.accelerator("cpu").attention(attention, "float32").value
        register_attention(chosen.name, chosen.function)
    made.set_attn_implementation(attention)
    if attention == "documents":
        attend_plainly(made)
    made.requires_grad_(False)
    for part in (made.get_decoder(), made.get_output_embeddings()):
        part.requires_grad_(True)
    return made.train()


def gradients(made: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in made.named_parameters() if parameter.grad is not None}


@cache
def expected(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed loss of plain transformers with eager attention, one document a forward, and its gradients."""
    plain, total = model(name, "eager"), torch.zeros(())
    for each in documents(name):
        inputs = {key: torch.tensor(array) for key, array in each.inputs.items()}
        ids = torch.tensor(each.input_ids)[None]
        logits = plain(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0]
        labels = torch.tensor(each.labels)[1:]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels, ignore_index=-100, reduction="sum")
    total.backward()
    return float(total.detach()), gradients(plain)


def row(several: Sequence[Document]) -> Any:
    """A packed row, as the facade makes it."""
    packed = forge_packing.collate([(each.input_ids, each.labels) for each in several])
    names = ("input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "weights")
    of_media = (lambda: [each.inputs for each in several]) if any(each.inputs for each in several) else None
    return SimpleNamespace(**{name: getattr(packed, name) for name in names}, media_inputs=of_media)


def completions(groups: Any, inputs: Sequence[Any]) -> Any:
    """A row of completions with their images."""
    fields = {name: getattr(groups, name) for name in attrs.fields_dict(type(groups))}
    return SimpleNamespace(**fields, media_inputs=lambda: inputs)


def trained(made: Any, rows: Sequence[Any], **objective: Any) -> tuple[float, dict[str, torch.Tensor]]:
    bound = forge_algos.SFT(forge_algos.SupervisedSettings(**objective)).bind(made, device=CPU)
    total = sum(bound(each, []).sum for each in rows)
    total.backward()
    return float(total.detach()), gradients(made)


def same(found: tuple[float, dict[str, torch.Tensor]], name: str) -> None:
    loss, grads = expected(name)
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert found[1].keys() == grads.keys()
    for key, gradient in grads.items():
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize(
    ("name", "attention"),
    [("gemma3", "sdpa"), ("qwen3-vl", "documents"), ("qwen3.5", "sdpa"), ("qwen2.5-omni", "documents")],
)
def test_one_document_a_row(name: str, attention: str) -> None:
    """Documents with images in rows of their own, and one without, give plain transformers' loss and gradients."""
    made = model(name, attention)
    forge_algos.keep_documents_apart(made, device=CPU)
    same(trained(made, [row([each]) for each in documents(name)]), name)


@pytest.mark.parametrize(
    ("name", "attention", "way"),
    [
        ("qwen3-vl", "documents", "bounds"),
        ("qwen3-vl", "sdpa", "bounds"),
        ("qwen3.5", "documents", "bounds"),
        ("qwen2.5-omni", "documents", "bounds"),
        ("gemma3", "sdpa", "lines"),
    ],
)
def test_several_documents_a_row(name: str, attention: str, way: str) -> None:
    """Packed where a model keeps documents with images apart, with its own positions of images; else padded under a mask."""
    made, given = model(name, attention), documents(name)
    forge_algos.keep_documents_apart(made, device=CPU)
    found, why = forge_algos.pack_media(made, given[:2], device=CPU)
    assert found == forge_algos.packs_media(made) == way, why
    same(trained(made, [row(given[:3]), row(given[3:])]), name)


def test_lines_alone() -> None:
    """A model that packs takes lines where packing is not wanted."""
    made, given = model("qwen3-vl", "sdpa"), documents("qwen3-vl")
    assert forge_algos.pack_media(made, given[:2], device=CPU, packing=False)[0] == "lines"
    same(trained(made, [row(given)]), "qwen3-vl")


def test_images_at_the_same_places() -> None:
    """Gemma 3's masks of windows look up images at another document's places; two alike are put at different ones."""
    given = [document("gemma3", 1, 5), document("gemma3", 1, 5)]
    way, why = forge_algos.pack_media(model("gemma3", "sdpa"), given, device=CPU)
    assert way == "lines"
    assert "packed, " in why
    assert "comes out otherwise than alone" in why


def test_an_image_that_leaks_in_few_digits() -> None:
    """In bfloat16 too, where the tokens of an image are few among many that come out as alone."""

    def among_words(seed: int, words: int) -> forge_algos.MediaDocument:
        given, more = document("gemma3", 1, seed), np.random.default_rng(seed).integers(5, 400, words)
        types = np.pad(given.inputs["token_type_ids"], ((0, 0), (0, words)))
        ids = np.concatenate([given.input_ids, more])
        return forge_algos.MediaDocument(ids, {**given.inputs, "token_type_ids": types}, given.spans)

    made = model("gemma3", "sdpa").to(torch.bfloat16)
    way, why = forge_algos.pack_media(made, [among_words(2, 100), among_words(3, 104)], device=CPU)
    assert way == "lines", why


def test_a_model_without_a_way() -> None:
    """Documents whose images' arrays do not join have a row each, and several in a row are refused."""
    made, given = model("gemma3", "sdpa"), documents("gemma3")
    wide = given[1]._replace(inputs={**given[1].inputs, "pixel_values": np.zeros((2, 3, 42, 42), np.float32)})
    way, why = forge_algos.pack_media(made, [given[0], wide], device=CPU)
    assert way is None
    assert "unlike sizes" in why
    with pytest.raises(forge_algos.PackedBatchError, match="row of 3 documents has media, and Gemma3.* give each a row"):
        trained(made, [row(given[:3])])


def test_padding_that_a_model_computes() -> None:
    """Rows are tried as they will be padded, documents alone as they are: a model that the padding moves has one a row."""
    made, given = model("gemma3", "sdpa"), documents("gemma3")

    def scaled(several: Sequence[Any]) -> list[Any]:
        return [{name: array * 1.5 if name == "pixel_values" else array for name, array in each.items()} for each in several]

    way, why = forge_algos.pack_media(made, given[:2], device=CPU, join=scaled)
    assert way is None
    assert "comes out otherwise than alone" in why


def test_attention_that_reads_no_mask() -> None:
    """A causal attention of our own is refused where the tokens of an image see each other, and taken elsewhere."""
    forge_algos.require_image_attention(model("qwen3-vl", "documents"), documents("qwen3-vl")[0], device=CPU)
    made = model("gemma3", "documents")
    with pytest.raises(forge_algos.PackedBatchError, match="tokens of an image or a clip see those .* attention=sdpa"):
        forge_algos.require_image_attention(made, documents("gemma3")[0], device=CPU)
    assert made.config._attn_implementation == made.config.text_config._attn_implementation == "documents"
    assert made.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("several", [1, 3])
def test_noise_on_rows_with_images(several: int) -> None:
    """NEFTune's noise takes the length of a document with images, alone and in lines."""
    made, given = model("gemma3", "sdpa"), documents("gemma3")
    forge_algos.pack_media(made, given[:2], device=CPU)
    plain = trained(made, [row(given[:several])])[0]
    assert trained(made, [row(given[:several])], neftune_alpha=5.0)[0] != plain


def test_a_mask_with_data_picks_places_of_a_tensor_without() -> None:
    """As Qwen3-VL adds what its tower says to the tokens of images, in a rehearsal too."""
    mask = torch.tensor([[True, False, True]])
    with _tracker.Tracker():
        given = _fake.fake_mode().from_tensor(torch.zeros(1, 3, 4))
        assert given[mask, :].shape == (2, 4)
        given[mask] = torch.ones(2, 4)


def test_images_that_fit_no_row() -> None:
    """What does not belong to the row's documents is one error."""
    made, given = model("qwen3-vl", "sdpa"), documents("qwen3-vl")
    forge_algos.pack_media(made, given[:2], device=CPU)
    two = row(given[:2])
    two.media_inputs = lambda: [given[0].inputs]
    with pytest.raises(forge_algos.PackedBatchError, match="one mapping for each of 2 documents, got 1"):
        trained(made, [two])
    wide = {**given[1].inputs, "pixel_values": np.zeros((4, 7), np.float32)}
    two.media_inputs = lambda: [given[0].inputs, wide]
    with pytest.raises(forge_algos.PackedBatchError, match=r"pixel_values .* unlike sizes, \[\d+, 1176\], \[4, 7\]"):
        trained(made, [two])


@pytest.mark.parametrize(("name", "attention", "way"), [("gemma3", "sdpa", "lines"), ("qwen3-vl", "documents", "bounds")])
def test_completions(name: str, attention: str, way: str) -> None:
    """Completions have the log-probabilities that plain transformers gives each alone, and its loss and gradients."""
    made, given = model(name, attention), documents(name)
    forge_algos.keep_documents_apart(made, device=CPU)
    assert forge_algos.pack_media(made, given[:2], device=CPU)[0] == way
    pairs = [[(each.input_ids, each.labels) for each in pair] for pair in (given[:2], given[2:])]
    groups = completions(forge_packing.collate_groups(pairs), [each.inputs for each in given])
    (found,) = forge_algos.reference_logps(made, [groups], device=CPU)
    plain = model(name, "eager").eval()
    for logp, each in zip(found, given, strict=True):
        inputs = {key: torch.tensor(array) for key, array in each.inputs.items()}
        ids = torch.tensor(each.input_ids)[None]
        with torch.no_grad():
            logits = plain(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0]
        assert -logp == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(each.labels)[1:], reduction="sum")), rel=1e-5
        )
    same(trained(made, [groups]), name)
    prompt = [(np.arange(5, 12), np.where(np.arange(7) > 4, np.arange(5, 12), -100))] * 2
    shared = forge_packing.collate_groups([prompt], share_prompt=True)
    with pytest.raises(forge_algos.PackedBatchError, match="media has completions that share a prompt.* share_prompt=False"):
        trained(made, [completions(shared, [{}, {}])])


def test_a_mask_of_pixels_stays_one() -> None:
    """Whether a model sees an image is tried with other pixels; the float array that says which of them count is as it was."""
    made, first = model("gemma3", "eager"), documents("gemma3")[0]
    mask, seen = np.ones((1, 2, 4, 4), np.float32), []

    def taken(_: Any, args: Any, given: dict[str, Any]) -> Any:
        seen.append(given.pop("image_attention_mask"))
        return args, given

    made.base_model.register_forward_pre_hook(taken, with_kwargs=True)
    inputs = {**first.inputs, "image_attention_mask": mask}
    forge_algos.require_media(made, first._replace(inputs=inputs), device=torch.device("cpu"))
    assert len(seen) > 1
    assert all(each.tolist() == mask.tolist() for each in seen)


def test_images_within_the_language_model() -> None:
    """Phi-4's tower is a part of its decoder, and would train unasked: that is one error, behind the test that it sees them."""
    config = Phi4MultimodalConfig(
        **{name: size for name, size in modalities.TEXT.items() if name != "head_dim"},
        vision_config={**modalities.VISION, "num_hidden_layers": 2, "image_size": 56, "crop_size": 56, "image_token_id": 500},
        audio_config={"num_blocks": 1, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2},
    )
    torch.manual_seed(20)
    made = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    inputs = {
        "image_pixel_values": np.random.default_rng(0).standard_normal((1, 2, 3, 56, 56)).astype(np.float32),
        "image_sizes": np.array([[56, 56]]),
        "image_attention_mask": np.ones((1, 2, 4, 4), np.float32),
    }
    ids = np.array([5, *[500] * 13, 7, 9])
    with pytest.raises(forge_algos.PackedBatchError, match="computes images within its language model, and names no part"):
        forge_algos.require_media(made, Document(ids, inputs, [(1, 14)]), device=torch.device("cpu"))


def test_a_plan_with_one_sample_a_row() -> None:
    """The same steps, each sample in a micro-batch of its own, on all ranks equally many."""
    lengths = np.random.default_rng(0).integers(1, 100, 50)
    plan = forge_packing.plan(lengths, batch_size=10, max_tokens=100, world_size=2, epochs=1)
    single = plan.padded(forge_packing.one_a_row(lengths, max_tokens=100))
    single.check()
    for step in range(plan.num_steps):
        assert single.samples(step).tolist() == plan.samples(step).tolist()
        ranks = [single.micro_batches(step, rank) for rank in range(2)]
        assert [len(each) for each in (*ranks[0], *ranks[1])] == [1] * 10
        gaps = [abs(int(lengths[a[0]]) - int(lengths[b[0]])) for a, b in zip(*ranks, strict=True)]
        assert max(gaps) <= np.diff(np.sort(lengths[plan.samples(step)])).max()
    assert forge_packing.one_a_row([1, 1], max_tokens=1).tolist() == [1, 1]


def test_images_counted_through_a_batch() -> None:
    """HunYuan-VL's positions count images over the lines of a batch, by less than a test in few digits sees: one a row.

    The sampler gives each prompt with images a batch of its own.
    """
    transformers = pytest.importorskip("transformers", minversion="5.24")
    rope = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}
    vision = {**modalities.VISION, "num_hidden_layers": 1, "text_hidden_size": 32, "max_image_size": 112, "min_media_size": 28}
    config = transformers.HunYuanVLConfig(
        text_config={**modalities.TEXT, "rope_parameters": {**rope, "xdrope_section": [1, 1, 1, 1]}},
        vision_config={**vision, "out_hidden_size": 32, "patch_size": 14},
        image_token_id=500,
        im_start_id=501,
        im_end_id=502,
        im_newline_id=503,
    )
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    draw, found = np.random.default_rng(0), []
    for words in (4, 6):
        ids = np.array([*draw.integers(5, 400, words), 501, *[500] * 8, 502, *draw.integers(5, 400, words)])
        inputs = {
            "pixel_values": draw.standard_normal((16, 3 * 14 * 14)).astype(np.float32),
            "image_grid_thw": np.array([[1, 4, 4]]),
            "mm_token_type_ids": (ids == 500).astype(np.int64)[None],
        }
        found.append(forge_algos.MediaDocument(ids, inputs, [(words, words + 10)]))
    way, why = forge_algos.pack_media(model, found, device=CPU)
    assert way is None
    assert "in lines, positions go by the images of the lines before" in why
    known = forge_algos.online.SampledMedia(documents=found, token_ids=frozenset({500}))
    sampler = forge_algos.online.GenerateSampler(model, eos_ids=[2], pad_id=0, batch_tokens=1_000, media=known)
    with torch.no_grad():
        made = sampler.sample(
            [each.input_ids for each in found] * 2,
            num_generations=2,
            max_new_tokens=4,
            temperature=1e-4,
            top_p=1.0,
            top_k=0,
            seed=0,
            media=[partial(dict, each.inputs) for each in found] * 2,
        )
    plain = [
        model.generate(
            input_ids=torch.as_tensor(each.input_ids)[None],
            **{name: torch.as_tensor(array) for name, array in each.inputs.items()},
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
            suppress_tokens=[500],
        )[0, len(each.input_ids) :].tolist()
        for each in found
    ]
    assert [one.ids.tolist() for one in made] == [plain[0]] * 2 + [plain[1]] * 2 + [plain[0]] * 2 + [plain[1]] * 2
    assert sampler._beside == "none"
