"""Directories of several modalities: their class, what trains of it, its dtype, its processor."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from forge_dist import LoadRequest, ModelError, check_model_path, export_model, load_model, media_parts
from forge_dist.loading._fsdp_groups import RESHARDED, without_shared
from forge_dist.loading._modalities import PROCESSOR_FILES, language_dtype, other_modalities, passed_over, processor_files
from forge_dist.loading._outline import outline_model
from forge_dist.loading._quantization import four_bit_layers

TEXT = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture
def saved(tmp_path):
    """Path of a tiny Gemma 3 with a vision tower, in bfloat16, with two processor files."""
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_id=60)
    directory = tmp_path / "base"
    transformers.Gemma3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)
    for name in ("preprocessor_config.json", "chat_template.json"):
        (directory / name).write_text('{"of": "' + name + '"}')
    return str(directory)


def load(path, **options):
    return load_model(path, **({"dtype": torch.float32, "device": "cpu"} | options))


def is_language(name):
    return "language_model" in name or name == "lm_head.weight"


def test_the_class_is_that_of_the_directory(saved):
    """The class that config.json names is loaded, with every weight of the directory."""
    check_model_path(saved)
    model = load(saved)
    assert type(model) is transformers.Gemma3ForConditionalGeneration
    expected = transformers.AutoModelForMultimodalLM.from_pretrained(saved, dtype=torch.float32)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name].float(), tensor), name


def test_all_but_the_language_part_is_frozen_in_the_dtype_of_its_files(saved):
    """What text does not train needs no gradient, and takes no more memory than its files."""
    model = load(saved)
    others = other_modalities(model)
    assert others.keys() == {name for name, _ in model.named_parameters() if not is_language(name)}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_language(name), name
        assert parameter.dtype == (torch.float32 if is_language(name) else torch.bfloat16), name
    assert language_dtype(model) == torch.float32


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "accelerate")), reason="needs bitsandbytes"
)
def test_a_quantized_base_sees_images_as_they_are(saved):
    """Layers of the language part alone are in 4 bits, loaded and in outline."""
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = load(saved, quantization=config)
    outline = outline_model(LoadRequest(model_path=saved, dtype=torch.float32, quantization=config))
    assert four_bit_layers(model).keys() == four_bit_layers(outline).keys()
    assert len(four_bit_layers(model)) == 2 * 7
    assert all("language_model" in name for name in four_bit_layers(model))


BOTH = ("vision_tower", "multi_modal_projector")


def outline(kind, **parts):
    """A model of default configurations without data, with one layer in each part."""
    small = {"num_hidden_layers": 1, "depth": 1, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0]}
    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")(text_config={**TEXT, **parts}, vision_config=small)
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def in_visual(*tower, projector):
    return {BOTH[0]: [f"model.visual.{name}" for name in tower], BOTH[1]: [f"model.visual.{name}" for name in projector]}


PARTS = {
    "Gemma3": {BOTH[0]: ["model.vision_tower"], BOTH[1]: ["model.multi_modal_projector"]},
    "Gemma4": {BOTH[0]: ["model.vision_tower"], BOTH[1]: ["model.embed_vision"]},
    "Llava": {BOTH[0]: ["model.vision_tower"], BOTH[1]: ["model.multi_modal_projector"]},
    "LlavaNext": {BOTH[0]: ["model.vision_tower"], BOTH[1]: ["model.multi_modal_projector", "model.image_newline"]},
    "Idefics3": {BOTH[0]: ["model.vision_model"], BOTH[1]: ["model.connector"]},
    "SmolVLM": {BOTH[0]: ["model.vision_model"], BOTH[1]: ["model.connector"]},
    "InternVL": {BOTH[0]: ["model.vision_tower"], BOTH[1]: ["model.multi_modal_projector"]},
    "Mistral3": {BOTH[0]: ["model.vision_tower"], BOTH[1]: ["model.multi_modal_projector"]},
    "Qwen2_5_VL": in_visual("patch_embed", "rotary_pos_emb", "blocks", projector=["merger"]),
    "Qwen3VL": in_visual("patch_embed", "pos_embed", "rotary_pos_emb", "blocks", projector=["merger", "deepstack_merger_list"]),
}


@pytest.mark.parametrize("kind", PARTS)
def test_which_modules_are_tower_and_projector(kind):
    """transformers' encoder of images, and what else stands beside the language part, or the tower's mergers."""
    text = {} if kind in ("Qwen2_5_VL", "Qwen3VL") else {"model_type": "llama"}
    model = outline(kind, **({} if kind.startswith("Gemma") else text))
    assert media_parts(model, BOTH) == PARTS[kind]
    assert media_parts(model, BOTH[:1]) == {BOTH[0]: PARTS[kind][BOTH[0]]}
    names = tuple(f"{name}." for names in PARTS[kind].values() for name in names)
    assert all(f"{name}.".startswith(names) for name in other_modalities(model))


HEARING = {
    "Qwen2Audio": {"audio_tower": ["model.audio_tower"], BOTH[1]: ["model.multi_modal_projector"]},
    "Gemma4": {
        BOTH[0]: ["model.vision_tower"],
        "audio_tower": ["model.audio_tower"],
        BOTH[1]: ["model.embed_vision", "model.embed_audio"],
    },
    "Qwen2_5OmniThinker": {
        BOTH[0]: [f"model.visual.{name}" for name in ("patch_embed", "rotary_pos_emb", "blocks")],
        "audio_tower": [
            f"model.audio_tower.{name}"
            for name in ("conv1", "conv2", "positional_embedding", "audio_bos_eos_token", "layers", "ln_post", "avg_pooler")
        ],
        BOTH[1]: ["model.visual.merger", "model.audio_tower.proj"],
    },
}


@pytest.mark.parametrize("kind", HEARING)
def test_towers_of_audio(kind):
    """transformers' encoder of audio, alone or beside one of images, and what turns either's vectors into the language's."""
    audio = {"encoder_layers": 1, "num_hidden_layers": 1}
    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")
        text = {"model_type": "qwen2"} if kind == "Qwen2Audio" else {}
        seen = {} if kind == "Qwen2Audio" else {"vision_config": {"num_hidden_layers": 1, "depth": 1}}
        made = config(text_config={**TEXT, **text}, audio_config=audio, **seen)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(made)
    assert media_parts(model) == HEARING[kind]
    assert media_parts(model, ["audio_tower"]) == {"audio_tower": HEARING[kind]["audio_tower"]}
    assert media_parts(model, BOTH[1:]) == {BOTH[1]: HEARING[kind][BOTH[1]]}
    if kind == "Qwen2Audio":
        with pytest.raises(ModelError, match=r"Qwen2Audio.* names no vision tower"):
            media_parts(model, BOTH)


def test_a_tower_that_is_named_encoder():
    """Granite Speech takes audio alone, and has one encoder, which transformers finds under no modality."""
    sizes = {"num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "output_dim": 16, "context_size": 20}
    with torch.device("meta"):
        config = transformers.GraniteSpeechConfig(
            text_config={**TEXT, "model_type": "llama"},
            encoder_config=sizes | {"max_pos_emb": 32},
            projector_config={"model_type": "blip_2_qformer", "hidden_size": 24, "num_hidden_layers": 1},
        )
        model = transformers.GraniteSpeechForConditionalGeneration(config)
    assert media_parts(model) == {"audio_tower": ["model.encoder"], BOTH[1]: ["model.projector"]}
    with pytest.raises(ModelError, match="names no vision tower"):
        media_parts(model, BOTH)


def test_a_projector_alone():
    """VibeVoice-ASR names no tower, of which it has two, and its projector by the name of one."""
    layers = {"model_type": "vibevoice_acoustic_tokenizer_encoder", "num_filters": 4, "depths": [1] * 7, "ffn_expansion": 2}
    sizes = {"downsampling_ratios": [2, 2, 4, 5, 5, 8], "hidden_size": 16}
    with torch.device("meta"):
        config = transformers.VibeVoiceAsrConfig(
            acoustic_tokenizer_encoder_config=layers | sizes,
            semantic_tokenizer_encoder_config=layers | sizes,
            text_config={**TEXT, "model_type": "qwen2"},
        )
        model = transformers.VibeVoiceAsrForConditionalGeneration(config)
    assert media_parts(model) == media_parts(model, BOTH[1:]) == {BOTH[1]: ["model.multi_modal_projector"]}
    with pytest.raises(ModelError, match="names no audio tower"):
        media_parts(model, ["audio_tower"])


def test_a_model_without_a_tower_of_audio():
    """It is said to name none."""
    with pytest.raises(ModelError, match=r"Gemma3ForConditionalGeneration names no audio tower \(get_encoder\)"):
        media_parts(outline("Gemma3"), ["audio_tower"])


def test_what_a_row_without_images_passes_over():
    """What stands beside the language part, and Mllama's layers of cross-attention: no groups of their own with images."""
    assert passed_over(outline("Gemma3")) == ["model.vision_tower", "model.multi_modal_projector"]
    with torch.device("meta"):
        text = {**TEXT, "pad_token_id": 0, "cross_attention_layers": [1]}
        config = transformers.MllamaConfig(text_config=text, vision_config={"num_hidden_layers": 1, "num_global_layers": 1})
        model = transformers.MllamaForConditionalGeneration(config)
    layers = [f"model.language_model.layers.{number}" for number in range(2)]
    assert passed_over(model) == ["model.vision_model", "model.multi_modal_projector", layers[1]]
    groups = dict.fromkeys(layers, RESHARDED)
    assert [*without_shared(model, groups)] == layers
    assert [*without_shared(model, groups, media=True)] == layers[:1]


def test_parts_that_cannot_be_told_apart():
    """A second tower may be of either part: one alone is refused by name, and both are taken."""
    model = outline("VideoLlava", model_type="llama")
    with pytest.raises(ModelError, match=r"VideoLlava.*cannot be told apart \(model.video_tower may be either\): train both"):
        media_parts(model, BOTH[:1])
    assert media_parts(model, BOTH)[BOTH[1]] == ["model.video_tower", "model.multi_modal_projector"]


@pytest.mark.parametrize("part", ["language_model", *BOTH])
def test_one_part_alone_trains(part, saved):
    """It is in the dtype of the weights that train, the others in that of their files, loaded and in outline."""
    request = LoadRequest(model_path=saved, dtype=torch.float32, trained=(part,))
    for model in (load(saved, trained=(part,)), outline_model(request)):
        for name, parameter in model.named_parameters():
            own = is_language(name) if part == "language_model" else f"{part}." in name
            assert parameter.requires_grad == own, name
            assert parameter.dtype == (torch.float32 if own else torch.bfloat16), name
        tied = model.get_output_embeddings().weight
        assert tied is model.get_input_embeddings().weight


def test_a_part_that_is_not_there(base):
    """A model of text alone has no tower."""
    with pytest.raises(ModelError, match="is a model of text alone, without vision_tower"):
        load(base, trained=("vision_tower",))


def test_a_model_of_text_has_no_other_modalities(base):
    """Nothing of an ordinary model is frozen."""
    model = load(base)
    assert other_modalities(model) == {}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert language_dtype(model) == torch.float32


def test_the_export(saved, tmp_path):
    """What did not train is written bit for bit, with the processor's files, and each part's configuration names the dtype."""
    model = load(saved)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1
    export = export_model(model, tmp_path / "export", dtype=torch.bfloat16)
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (saved, export))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) != ("language_model" in name), name
    assert [file.name for file in processor_files(str(export))] == ["preprocessor_config.json", "chat_template.json"]
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert {config["dtype"], config["text_config"].get("dtype", "bfloat16")} == {"bfloat16"}
    assert "_name_or_path" not in config["text_config"]


def test_processor_files_of_a_hub_name_come_from_its_cache(monkeypatch, tmp_path):
    """They are looked for on the network while the model is loaded, and in the cache afterwards."""
    asked = []

    def cached_file(name, file, *, local_files_only):
        asked.append((file, local_files_only))
        if file != "processor_config.json":
            raise OSError(f"{name} has no {file}")
        return str(tmp_path / file)

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    for fetch in (True, False):
        assert processor_files("org/name", fetch=fetch) == [tmp_path / "processor_config.json"]
        assert asked == [(file, not fetch) for file in PROCESSOR_FILES]
        asked.clear()


def edit(path, **changes):
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_class_that_does_not_exist_is_refused(saved):
    """A class that transformers does not have for this type is named, before weights are read."""
    edit(saved, architectures=["Gemma5ForConditionalGeneration"])
    with pytest.raises(
        ModelError, match=r"names the class Gemma5ForConditionalGeneration.* has none of that name for .*'gemma3'"
    ):
        load(saved)


def test_a_class_that_is_not_listed_is_refused(saved):
    """A class that transformers has, and loads by no configuration, is said to be that."""
    edit(saved, architectures=["AudioFlamingo3ForConditionalGeneration"])
    with pytest.raises(ModelError, match="does not list it in AutoModelForMultimodalLM"):
        load(saved)


def test_audio_flamingo_3_is_loaded_by_its_own_list(tmp_path):
    """transformers lists this decoder that hears with models of encoder and decoder."""
    audio = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_mel_bins": 8}
    config = transformers.AudioFlamingo3Config(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": 64}, audio_config=audio, audio_token_id=3
    )
    transformers.AudioFlamingo3ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert type(model) is transformers.AudioFlamingo3ForConditionalGeneration
    assert media_parts(model) == {"audio_tower": ["model.audio_tower"], BOTH[1]: ["model.multi_modal_projector"]}
    assert not any("audio" in name for name, weight in model.named_parameters() if weight.requires_grad)


def test_an_encoder_decoder_inside_is_refused(saved):
    """A language part that is an encoder and a decoder is no causal language model."""
    edit(saved, text_config={**TEXT, "is_encoder_decoder": True})
    with pytest.raises(ModelError, match="encoder-decoder"):
        check_model_path(saved)


def test_rewards(saved):
    """A reward model is made where transformers has a class for it: its new head trains, and the vision tower does not."""
    model = load(saved, task="reward")
    assert type(model) is transformers.Gemma3ForSequenceClassification
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == set(other_modalities(model))
    assert model.score.weight.requires_grad


def test_a_family_without_rewards_is_refused(tmp_path):
    """Where transformers has no such class, the error says so."""
    config = transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 4},
        image_token_index=60,
    )
    transformers.Mistral3ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"mistral3 gives no rewards: .* no class \.\.\.ForSequenceClassification"):
        load(str(tmp_path), task="reward")


def test_a_text_is_marked_where_a_model_trains_on_nothing_else(tmp_path):
    """Molmo 2 trains on rows of text, which it refuses without `mm_token_type_ids`, as on those of its processor."""
    vision = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "image_size": [28, 28],
        "patch_size": 14,
        "num_position_embeddings": 4,
    }
    adapter = {**vision, "vision_feature_layer": [-1], "text_hidden_size": 16}
    config = transformers.Molmo2Config(text_config=TEXT, vision_config=vision, adapter_config=adapter)
    transformers.Molmo2ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    model, ids = load(str(tmp_path / "base")), torch.tensor([[5, 7, 9, 11]])
    assert not model.training
    marks = torch.zeros_like(ids)
    for training in (False, True):
        model.train(training)
        for given in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)}):
            found = model(**given, use_cache=False).logits
            assert torch.equal(found, model(**given, use_cache=False, mm_token_type_ids=marks).logits)
    model.train().base_model._forward_pre_hooks.clear()
    with pytest.raises(ValueError, match="`mm_token_type_ids` is required"):
        model(input_ids=ids, use_cache=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_text_is_causal(attention, tmp_path):
    """PaliGemma has no mask of a text under sdpa, and its layers are not causal: what is ahead is not seen."""
    text = {**TEXT, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=VISION, projection_dim=16, image_token_index=60)
    transformers.PaliGemmaForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    model, ids = load(str(tmp_path / "base"), attention=attention), torch.tensor([[5, 7, 9, 11], [5, 7, 9, 12]])
    embedded = model.get_input_embeddings()(ids)
    for given in ({"input_ids": ids}, {"inputs_embeds": embedded}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        found = model(**given, use_cache=False).logits
        assert torch.equal(found[0, :3], found[1, :3])
    prefix = model(input_ids=ids, token_type_ids=torch.zeros_like(ids), use_cache=False).logits
    assert not torch.equal(prefix[0, :3], prefix[1, :3])


def test_no_other_model_is_marked(saved):
    """A model that trains on text as it is gets no hook."""
    assert not any(module._forward_pre_hooks for module in load(saved).modules())
