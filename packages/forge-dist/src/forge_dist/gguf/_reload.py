"""GGUF file → the model that its readers see, in transformers' classes."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forge_dist._errors import ExportError
from forge_dist.gguf._architectures import FLOATS, INTEGERS, Architecture
from forge_dist.gguf._layout import gguf_tensors
from forge_dist.gguf._rotary import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    own_frequencies,
    plain_frequencies,
    rotary_parameters,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Contents(NamedTuple):
    """Contents of a file, as the gguf library reads them; tensors stay on the disk."""

    fields: dict[str, Any]
    tensors: dict[str, Any]

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as float32, its rows in the file's order."""
        from gguf import dequantize

        tensor = self.tensors[name]
        return torch.tensor(dequantize(tensor.data, tensor.tensor_type)).reshape(tuple(reversed(tensor.shape.tolist())))


def read_contents(path: Path) -> Contents:
    """Read a file's fields, and where its tensors are.

    Raises:
        ExportError: it is no GGUF file, or not a whole one.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise ExportError(f"{path} cannot be read back: {error}") from error
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return Contents(fields, {tensor.name: tensor for tensor in reader.tensors})


def reload_gguf(path: Path, model: "PreTrainedModel", contents: Contents, arch: Architecture) -> "PreTrainedModel":
    """Load a file as a model in float32.

    Through transformers where it reads the architecture, else by `ARCHITECTURES`: what the file says, what its readers assume,
    and else transformers' own defaults.
    """
    load = _by_transformers if arch.by_transformers else _by_table
    return load(path, model, contents, arch).eval()


def _by_transformers(path: Path, model: "PreTrainedModel", contents: Contents, arch: Architecture) -> "PreTrainedModel":
    """Load a file through transformers, with two values that it does not read by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # The whole path, though its folder is named too: transformers prefers a file of that name in the working directory.
    config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=str(path), trust_remote_code=False)
    config.head_dim = contents.fields[f"{arch.name}.attention.key_length"]
    config._attn_implementation = str(model.config._attn_implementation)
    reloaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=str(path), config=config, dtype=torch.float32, trust_remote_code=False
    )
    if ROPE_FACTORS in contents.tensors:
        own_frequencies(reloaded).copy_(plain_frequencies(config) / contents.read(ROPE_FACTORS))
    return reloaded


def _by_table(path: Path, model: "PreTrainedModel", contents: Contents, arch: Architecture) -> "PreTrainedModel":
    """Make the model that a file's fields describe, and fill it with its tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    begin = f"{arch.name}."
    fields = {key.removeprefix(begin): value for key, value in contents.fields.items() if key.startswith(begin)}
    factors = {name: contents.read(name).tolist() for name in (LONG_FACTORS, SHORT_FACTORS) if name in contents.tensors}
    settings = {name: fields[key] for key, name in (INTEGERS | FLOATS | dict(arch.integers) | dict(arch.floats)).items()}
    settings |= {
        "max_position_embeddings": fields["context_length"],
        "head_dim": fields["attention.key_length"],
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "rope_parameters": rotary_parameters(fields, factors),
        "pad_token_id": None,  # a class's own may be no row of this model's embedding
    }
    read = SimpleNamespace(**settings)
    for name, value in arch.assumed.items():
        settings.setdefault(name, value(read) if callable(value) else value)
    config = AutoConfig.for_model(model.config.model_type, **settings)
    with no_init_weights():
        reloaded = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=str(model.config._attn_implementation), trust_remote_code=False
        )
    reloaded.tie_weights()
    tensors = gguf_tensors(reloaded, arch, path)
    for name, tensor in tensors.items():
        if name not in contents.tensors:
            raise ExportError(f"{path}: readers of GGUF's {arch.name!r} look for a tensor {name}, which is not there")
        tensor.fill(contents.read(name))
    return reloaded
