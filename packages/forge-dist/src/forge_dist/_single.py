"""One process: nothing is divided."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from forge_dist._attention import AttentionFunction
from forge_dist._divided import Divided
from forge_dist._load import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Single(Divided):
    """The strategy of a world of one, whatever was asked for by name."""

    def load(
        self,
        model_path: str,
        *,
        dtype: torch.dtype,
        attention: str | None = "sdpa",
        attention_function: AttentionFunction | None = None,
    ) -> "PreTrainedModel":
        return load_model(
            model_path, dtype=dtype, device=self.device, attention=attention, attention_function=attention_function
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002  the protocol's
        return nullcontext()
