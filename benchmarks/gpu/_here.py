"""What every check stands on: the device, models of known shapes with random weights, rows, and forge's own loop."""

import math
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SHAPES: dict[str, dict[str, Any]] = {
    name: {
        **dict(zip(("hidden_size", "intermediate_size", "num_hidden_layers"), sizes[:3], strict=True)),
        **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"), sizes[3:], strict=True)),
        "tie_word_embeddings": name != "8b",
    }
    for name, sizes in {
        "toy": (64, 128, 2, 4, 2, 16, 512),
        "small": (512, 1536, 6, 8, 2, 64, 32_000),
        "0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
        "1b": (2048, 8192, 16, 32, 8, 64, 128_256),
        "8b": (4096, 14_336, 32, 32, 8, 128, 128_256),
    }.items()
}
Sample = namedtuple("Sample", "input_ids labels")  # noqa: PYI024 - what forge_packing reads of a sample


class Check(NamedTuple):
    """Check or measurement: `run(here)` returns whether it is right (None: there is nothing to pass), and its facts."""

    group: str
    run: Callable[["Here"], tuple[bool | None, dict[str, Any]]]


CHECKS: dict[str, Check] = {}


def check(group: str) -> Callable[[Callable[["Here"], Any]], Callable[["Here"], Any]]:
    """Add a function to the checks of a group, `right` or `speed`, under its name."""

    def add(function: Callable[[Here], Any]) -> Callable[[Here], Any]:
        CHECKS[function.__name__] = Check(group, function)
        return function

    return add


class Here:
    """The device, and what `--toy` changes: toy shapes, on which nothing is claimed."""

    def __init__(self, device: str, *, toy: bool) -> None:
        import torch

        from forge_accel import accelerator

        self.torch, self.toy = torch, toy
        self.machine = accelerator(device)
        self.device = self.machine.device.value
        self.gpu = self.device.type != "cpu"
        self.dtype = torch.bfloat16
        self.autocast = partial(self.machine.autocast, torch.bfloat16)

    def shape(self, name: str) -> dict[str, Any]:
        """Return the sizes of a model; those of a toy with `--toy`."""
        return SHAPES["toy" if self.toy else name]

    def model(
        self,
        shape: str,
        *,
        dtype: Any,
        attention: str = "documents",
        layers: int | None = None,
        seed: int = 0,
        function: Any = None,
    ) -> Any:
        """Make a Llama of a shape with seeded random weights on the device; `function` is another attention."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        from forge_dist.loading._attention import register_attention

        if attention == "documents":
            register_attention(attention, function or self.machine.attention("auto", self.dtype).value.function)
        fields = dict(self.shape(shape))
        if layers:
            fields["num_hidden_layers"] = min(layers, fields["num_hidden_layers"])
        config = LlamaConfig(**fields, max_position_embeddings=32_768)
        self.torch.manual_seed(seed)
        with self.torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)

    def quantized(self, shape: str, quant_type: str = "nf4") -> tuple[Any, Any]:
        """Load a model of a shape in 4 or 8 bits; return it and the settings of its adapter.

        Raises:
            AccelError: the device has no such kernels.
            MissingPackageError: bitsandbytes is not installed.
        """
        from forge_algos import AdapterSettings, quantization_config
        from forge_dist import load_model

        settings = AdapterSettings(adapter="qlora", quant_type=quant_type, lora_r=16, lora_alpha=32.0)
        self.machine.quantization(settings.quant_type)
        how = {"quantization": quantization_config(settings, self.dtype), "dtype": self.dtype, "attention": "documents"}
        with TemporaryDirectory() as folder:
            self.model(shape, dtype=self.dtype).save_pretrained(folder)
            function = self.machine.attention("auto", self.dtype).value.function
            return load_model(folder, device=self.device, attention_function=function, **how), settings

    def rows(self, shape: str, lengths: Iterable[int], seed: int = 0, system: int = 0) -> list[Sample]:
        """Draw samples of random tokens, 60 % of each learned; all begin with the same `system` tokens."""
        import numpy as np

        rng, found = np.random.default_rng(seed), []
        for length in lengths:
            ids = rng.integers(0, self.shape(shape)["vocab_size"], length).astype(np.int32)
            labels = ids.copy()
            ids[:system] = found[0].input_ids[:system] if found else ids[:system]
            labels[: max(1, system, int(length * 0.4))] = -100
            found.append(Sample(ids, labels))
        return found

    def lengths(self, tokens: int, seed: int = 0) -> list[int]:
        """Draw lengths like those of chats, which fill a row exactly."""
        import numpy as np

        tokens, mean = (128, 40) if self.toy else (tokens, 900)
        rng, found = np.random.default_rng(seed), []
        while (left := tokens - sum(found)) > 0:
            found.append(min(left, int(np.clip(rng.lognormal(math.log(mean), 0.8), 16, 4096))))
        return found

    def train(self, model: Any, steps: Iterable[Any], **how: Any) -> Iterator[Any]:
        """Forge's own loop: SFT with the optimizer of `settings`, clipped at 1.0."""
        from forge_algos import SFT, OptimizerSettings, make_optimizer, schedule, train

        settings = how.pop("settings", None) or OptimizerSettings(learning_rate=1e-4, lr_scheduler="constant")
        optimizer = how.pop("optimizer", None) or make_optimizer(model, settings, fused=self.machine.fused_optimizer.value)
        how = {"max_grad_norm": 1.0, "device": self.device, "autocast": self.autocast, **how}
        return train(
            model,
            steps,
            objective=SFT(),
            optimizer=optimizer,
            scheduler=schedule(optimizer, settings, num_steps=10**6),
            **how,
        )

    def peaks(self) -> dict[str, float | None]:
        """Read the peak memory of tensors since the last reset, in GiB; None where the device does not tell."""
        peak = self.machine.peak_memory_bytes() if self.gpu else None
        return {"peak_gib": None if peak is None else round(peak / 2**30, 2)}


def packed(samples: list[Sample], *, shared: bool = False) -> Any:
    """Pack samples into one row, with what they begin with once or each time."""
    from forge_packing import collate, collate_shared

    return collate_shared(samples) if shared else collate(samples)


def relative(ours: Any, theirs: Any) -> float:
    """Return the norm of two tensors' difference over the second's."""
    ours, theirs = ours.double().flatten(), theirs.double().flatten()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
