"""Tiny models with processors of their own, rows with media, and what plain transformers makes of them."""

from __future__ import annotations

import json
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForMultimodalLM,
    AutoProcessor,
    Gemma3Processor,
    Idefics2Config,
    Idefics2Processor,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextProcessor,
    LlavaProcessor,
    MllamaConfig,
    MllamaProcessor,
    PaliGemmaConfig,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)
from transformers.audio_utils import load_audio
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from .. import films
from . import modalities, reference
from .conftest import conversations, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    import forge_data

TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] != 'text' %}PLACEHOLDER{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def _tokenizer(placeholder: str, **marks: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the special tokens `marks`, whose template writes `placeholder` for a medium."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<pad>", "<start>", "<end>", *marks.values()]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([message["content"] for row in conversations() for message in row["messages"]], trainer)
    named = {name: mark for name, mark in marks.items() if name.endswith("_token")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>", **named)
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    return tokenizer


def _gemma3() -> tuple[Any, Any]:
    """4 tokens for an image, which see each other, between marks and blank lines: documents in padded lines."""
    marks = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
    tokenizer = _tokenizer("<boi>", **marks)
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    config = modalities.CONFIGS["gemma3"]()
    config.boi_token_index, config.eoi_token_index, config.image_token_id = tokenizer.convert_tokens_to_ids([*marks.values()])
    processor = Gemma3Processor(
        image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4
    )
    return config, processor


def _llava(layers: int = 1) -> tuple[Any, Any]:
    """4 tokens for an image: packed documents. Of two layers of the tower the first is read, as LLaVA's own models do."""
    tokenizer = _tokenizer("<image>", image_token="<image>")
    config = LlavaConfig(
        text_config={**modalities.TEXT, "model_type": "llama"},
        vision_config={**modalities.VISION, "num_hidden_layers": layers, "model_type": "clip_vision_model"},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        vision_feature_layer=-layers,
    )
    side = {"height": 28, "width": 28}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return config, processor


def _llava_next() -> tuple[Any, Any]:
    """Images cut into two to five pieces, padded to the most: packed documents."""
    tokenizer, cut = _tokenizer("<image>", image_token="<image>"), [[28, 56], [56, 28], [56, 56]]
    config = LlavaNextConfig(
        text_config={**modalities.TEXT, "model_type": "llama"},
        vision_config={**modalities.VISION, "num_hidden_layers": 1, "model_type": "clip_vision_model"},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=cut,
        vision_feature_layer=-1,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=cut
    )
    processor = LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return config, processor


def _idefics2() -> tuple[Any, Any]:
    """3 tokens for an image, between marks that neighbours share; images of unlike sizes, padded: packed documents."""
    tokenizer = _tokenizer("<image>", mark="<fake_token_around_image>", image="<image>", end="<end_of_utterance>")
    images = Idefics2ImageProcessorPil(size={"shortest_edge": 28, "longest_edge": 56})
    processor = Idefics2Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=3, chat_template=tokenizer.chat_template
    )
    latents = {"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
    config = Idefics2Config(
        text_config={**modalities.TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config={**modalities.VISION, "num_hidden_layers": 1, "image_size": 56},
        perceiver_config={**latents, "hidden_size": 32, "num_key_value_heads": 1},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return config, processor


def _mllama() -> tuple[Any, Any]:
    """One token for an image, which layers of their own attend to from there on: one document a row."""
    tokenizer = _tokenizer("<|image|>", bos_token="<bos>", image="<|image|>")
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    images = MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=2)
    tower = {"hidden_size": 16, "attention_heads": 2, "num_hidden_layers": 2, "num_global_layers": 1, "intermediate_size": 24}
    tiles = {"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "image_size": 28, "patch_size": 14}
    config = MllamaConfig(
        text_config={**modalities.TEXT, "cross_attention_layers": [1]},
        vision_config={**tower, **tiles, "vision_output_dim": 48, "intermediate_layers_indices": [0, 1]},
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
    )
    return config, MllamaProcessor(image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template)


def _paligemma() -> tuple[Any, Any]:
    """4 tokens for an image, no chat template; all before the completion sees what is ahead: PaliGemma 2."""
    tokenizer = _tokenizer("", bos_token="<bos>")
    processor = PaliGemmaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": 28, "width": 28}, image_seq_length=4), tokenizer=tokenizer
    )
    tokenizer.chat_template = None
    sliding = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = PaliGemmaConfig(
        text_config={**modalities.TEXT, **sliding, "model_type": "gemma2", "vocab_size": 1536, "query_pre_attn_scalar": 8},
        vision_config={**modalities.VISION, "num_hidden_layers": 1, "vision_use_head": False},
        projection_dim=32,
        hidden_size=32,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return config, processor


def _qwen2_audio() -> tuple[Any, Any]:
    """A token for 40 ms of audio, of which clips in a forward are padded to the longest: packed documents."""
    marks = {"audio_token": "<AUDIO>", "audio_bos_token": "<abos>", "audio_eos_token": "<aeos>"}
    tokenizer = _tokenizer("<abos><AUDIO><aeos>", **marks)
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    config = Qwen2AudioConfig(
        audio_config={**sizes, "num_mel_bins": 8, "max_source_positions": 50},
        text_config={**modalities.TEXT, "model_type": "qwen2"},
        audio_token_index=tokenizer.convert_tokens_to_ids("<AUDIO>"),
    )
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=8, chunk_length=1),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    return config, processor


def _one_clip(name: str) -> tuple[Any, Any]:
    """GLM-ASR's and Qwen3-ASR's processors take one clip a text, and give tensors of PyTorch alone."""
    marks = {"audio_token": "<AUDIO>", "audio_bos_token": "<abos>", "audio_eos_token": "<aeos>"}
    tokenizer = _tokenizer("<AUDIO>" if name == "GlmAsr" else "<abos><AUDIO><aeos>", **marks)
    audio = {"num_mel_bins": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "GlmAsr":
        audio |= {"intermediate_size": 64, "max_position_embeddings": 100}
    else:
        audio = {"num_mel_bins": 8, "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
        audio |= {"max_source_positions": 100, "output_dim": 32, "downsample_hidden_size": 8}
    config = getattr(transformers, f"{name}Config")(
        audio_config=audio,
        text_config={**modalities.TEXT, "model_type": "llama" if name == "GlmAsr" else "qwen3"},
        audio_token_id=tokenizer.convert_tokens_to_ids("<AUDIO>"),
    )
    own = getattr(transformers, f"{name}FeatureExtractor", None)
    extractor = own(feature_size=8) if own else WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    more = {"audio_token": "<AUDIO>"} if name == "GlmAsr" else {}
    processor = getattr(transformers, f"{name}Processor")(
        feature_extractor=extractor, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **more
    )
    return config, processor


def _qwen3_vl() -> tuple[Any, Any]:
    """Images and videos of any size, with the times of frames in the text: packed documents."""
    tokenizer = _tokenizer("", **dict(zip(("start", "end", "image", "video"), films.MARKS, strict=True)))
    which = "{{% if part['type'] == 'video' %}}{video}{{% else %}}{image}{{% endif %}}".format(**films.PLACEHOLDERS)
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", which)
    config = modalities.CONFIGS["qwen3-vl"]()
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    for name, token in zip(names, tokenizer.convert_tokens_to_ids([*films.MARKS]), strict=True):
        setattr(config, name, token)
    return config, films.FilmProcessor.of(tokenizer)


FAMILIES = {
    "gemma3": _gemma3,
    "llava": _llava,
    "llava-before-last": partial(_llava, 2),
    "llava-next": _llava_next,
    "idefics2": _idefics2,
    "mllama": _mllama,
    "paligemma": _paligemma,
    "qwen2-audio": _qwen2_audio,
    "qwen3-vl": _qwen3_vl,
    "glm-asr": partial(_one_clip, "GlmAsr"),
    "qwen3-asr": partial(_one_clip, "Qwen3ASR"),
}
"""Models whose processors need no torchvision."""


def save(name: str, directory: Path, auto: Any = AutoModelForMultimodalLM, *, seed: int = 20, **more: Any) -> Path:
    """The tiny model `name` with fixed random weights in bfloat16, and its processor; `more` are of its configuration."""
    config, processor = FAMILIES[name]()
    config.update(more)
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
            parameter.data = parameter.to(torch.bfloat16)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    processor.tokenizer.save_pretrained(directory)
    return directory


def picture(seed: int) -> Image.Image:
    """An image of noise, of a size that its seed draws."""
    draw = np.random.default_rng(seed)
    height, width = draw.integers(20, 60, 2).tolist()
    return Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8))


def clip(file: Path, seed: int) -> None:
    """Write noise of a length, a rate and a number of channels that its seed draws."""
    import soundfile  # not everywhere that images are

    draw, rate = np.random.default_rng(seed), (16_000, 22_050, 8_000)[seed % 3]
    samples = draw.uniform(-0.5, 0.5, (int(rate * draw.uniform(0.1, 0.9)), 1 + seed % 2))
    soundfile.write(file, samples.astype(np.float32), rate)


def conversation(folder: Path, number: int, media: int, kind: str = "image") -> dict[str, Any]:
    """A conversation of one or two turns, with media of its own before, in and behind the user's texts; videos are frames."""
    (folder / "images").mkdir(exist_ok=True)
    (row,) = conversations(number + 1)[number:]
    asked = [message for message in row["messages"] if message["role"] == "user"]
    for medium in range(media):
        file: Any = f"images/{number}_{medium}.{'wav' if kind == 'audio' else 'png'}"
        if kind == "image":
            picture(10 * number + medium).save(folder / file)
        elif kind == "video":
            size = [(32, 60), (60, 30), (29, 29)][(number + medium) % 3]
            file = films.frames(folder, f"images/{number}_{medium}", 2 + (number + 2 * medium) % 4, size)
        else:
            clip(folder / file, 10 * number + medium)
        message: dict[str, Any] = asked[medium % len(asked)]
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        message["content"].insert((number + medium) % 2, {"type": kind, kind: file})
    return row


def rows(folder: Path, number: int = 24, name: str = "rows.jsonl", first: int = 0, kind: str = "image") -> Path:
    """Conversations with one image or clip, with two, and with none, in turn."""
    numbers = range(first, first + number)
    return write_rows(folder / name, [conversation(folder, each, (each + 1) % 3, kind) for each in numbers])


def pair(folder: Path, number: int, images: int, kind: str = "image") -> dict[str, Any]:
    """A preference whose prompt has images, or audio."""
    row = conversation(folder, number, images, kind)
    at = next(at for at, message in enumerate(row["messages"]) if message["role"] == "assistant")
    chosen = row["messages"][at]
    rejected = {"role": "assistant", "content": "it is " + "not " * (number % 4) + "there."}
    return {"prompt": row["messages"][:at], "chosen": [chosen], "rejected": [rejected]}


def pairs(folder: Path, number: int = 24, images: int = 3, kind: str = "image") -> Path:
    """Preferences with one image, with two, and with none, in turn; with `images` 2 half have none."""
    return write_rows(folder / "pairs.jsonl", [pair(folder, each, (each + 1) % images, kind) for each in range(number)])


def rated(folder: Path, number: int = 24, images: int = 3, kind: str = "image") -> Path:
    """Rated answers to the same prompts: the chosen ones are wanted, and the rejected ones, which a third of rows have, not."""
    found = []
    for each in range(number):
        row = pair(folder, each, (each + 1) % images, kind)
        found.append(
            {"prompt": row["prompt"], "completion": row["chosen" if each % 3 else "rejected"], "label": bool(each % 3)}
        )
    return write_rows(folder / "rated.jsonl", found)


def prompts(folder: Path, number: int = 12, images: int = 3, kind: str = "image") -> Path:
    """Prompts with one image, with two, and with none, in turn, and what is to be answered; with `images` 2 half have none."""
    made = [pair(folder, each, (each + 1) % images, kind) for each in range(number)]
    return write_rows(
        folder / "prompts.jsonl", [{"prompt": row["prompt"], "answer": row["chosen"][0]["content"]} for row in made]
    )


def load(part: dict[str, Any], folder: Path, processor: Any) -> None:
    """Decode the medium of a part, whose path begins in a folder, as a processor is given it."""
    if part["type"] == "image":
        part["image"] = load_image(str(folder / part["image"]))
    elif part["type"] == "video" and isinstance(part["video"], str):
        part["video"] = str(folder / part["video"])
    elif part["type"] == "video":
        part["video"] = [load_image(str(folder / frame)) for frame in part["video"]]
    elif part["type"] == "audio":
        hears = getattr(processor, "feature_extractor", None) or processor.audio_processor
        part["audio"] = load_audio(str(folder / part["audio"]), hears.sampling_rate, backend="soundfile")


def prompt_inputs(model: Path, messages: list[dict[str, Any]], folder: Path | None = None) -> dict[str, torch.Tensor]:
    """What the model's processor makes of messages that are to be answered; their paths begin in `folder`."""
    asked, processor = json.loads(json.dumps(messages)), _processor(model)
    for message in asked:
        for part in message["content"] if isinstance(message["content"], list) else []:
            load(part, folder or Path(), processor)
    made = processor.apply_chat_template(
        asked, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return dict(made)


@cache
def _processor(directory: Path) -> Any:
    return AutoProcessor.from_pretrained(directory)


def read(model: Path, folder: Path, messages: list[dict[str, Any]]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """What the model's processor makes of messages whose images lie in a folder: ids, and the rest of a forward's arguments."""
    messages, processor = json.loads(json.dumps(messages)), _processor(model)
    for part in (part for message in messages for part in message["content"] if isinstance(part, dict)):
        load(part, folder, processor)
    made = dict(processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt"))
    return made.pop("input_ids")[0].tolist(), made


def steps(plain: Any, plan: Any, loss: Callable[[list[int]], torch.Tensor]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a plan, of a plain model that is trained as `three_steps.SETTINGS` has it."""
    recipe = reference.Recipe(1e-3, 3, lr_scheduler="constant", max_grad_norm=0.5)
    optimizer, found = reference.AdamW(plain, recipe, lambda _name, _parameter: False), []
    for step in range(plan.num_steps):
        plain.zero_grad()
        value = loss(plan.samples(step).tolist())
        value.backward()
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in plain.named_parameters()
            if parameter.requires_grad
        }
        found.append((float(value.detach()), reference.norm(gradients)))
        optimizer.step(reference.clip(gradients, 0.5), 1e-3)
    return found


def import_beside(data: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the module `name`, which lies beside `data`, be imported, and not one of another test."""
    monkeypatch.syspath_prepend(data.parent)
    monkeypatch.delitem(sys.modules, name, raising=False)


def inputs_of(model: Path, data: Path) -> Any:
    """What the model's processor makes of each row, `three_steps.Inputs`; ids and learned tokens must be those of the store."""
    processor = _processor(model)
    given = data.read_text().splitlines()

    def inputs(store: forge_data.TokenStore, at: int) -> dict[str, torch.Tensor]:
        name, _, number = store.source(at).rpartition(":")
        assert Path(name).name == data.name
        messages = json.loads(given[int(number) - 1])["messages"]
        for message in messages:
            # What the template of a processor is given for a text too.
            parts = message["content"] if isinstance(message["content"], list) else []
            for part in parts:
                load(part, data.parent, processor)
        made = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        ids, sample = made.pop("input_ids")[0], store[at]
        assert ids.tolist() == sample.input_ids.tolist()
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        learned = sample.input_ids[sample.labels != -100]
        assert processor.tokenizer.decode(learned) == "".join(f"{answer}<end>" for answer in answers)
        return dict(made)

    return inputs


def with_adapter(plain: Any, make: Callable[[], Any], folder: Path, task: str) -> Any:
    """Put a LoRA with drawn weights on a model's language part, to be trained on, and write it into a folder.

    Args:
        plain: the model.
        make: makes another one alike.
        folder: of the adapter.
        task: PEFT's `task_type`.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(3)
    targets = r".*language_model.*(q_proj|down_proj)"
    made: Any = get_peft_model(make(), LoraConfig(r=4, target_modules=targets, task_type=task))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return PeftModel.from_pretrained(plain, folder, is_trainable=True)
