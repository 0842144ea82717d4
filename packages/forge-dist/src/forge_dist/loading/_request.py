"""Arguments of `load_model` and `Strategy.load` as one object."""

from typing import TYPE_CHECKING

import attrs
import torch

from forge_dist.loading._attention import AttentionFunction
from forge_dist.loading._modalities import LANGUAGE
from forge_dist.loading._model_path import Task

if TYPE_CHECKING:
    from transformers.utils.quantization_config import QuantizationConfigMixin


@attrs.frozen(kw_only=True)
class LoadRequest:
    """Model to load, and how; what a strategy's `read` is given."""

    model_path: str
    """Directory, or name on the hub (org/name)."""

    dtype: torch.dtype
    """Dtype of the floats."""

    attention: str | None = "sdpa"
    """transformers' name of an attention, or the name of `attention_function`; None: transformers' own choice."""

    attention_function: AttentionFunction | None = None
    """Attention of the caller's own, registered under the name `attention`."""

    task: Task = "causal"
    """causal: a language model; reward: one label; embedding: without a head; a Classifier: several labels."""

    quantization: "QuantizationConfigMixin | None" = None
    """transformers' configuration of a base in fewer bits, such as BitsAndBytesConfig."""

    other_dtype: torch.dtype | None = None
    """Dtype in which the frozen parts of a model of several modalities are kept, where that is wider than the directory's;
    None: the directory's."""

    trained: tuple[str, ...] = LANGUAGE
    """Parts of such a model that train: any of language_model, vision_tower, audio_tower, multi_modal_projector."""

    media: bool = False
    """Whether rows have images, `Strategy.media`."""
