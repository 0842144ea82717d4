"""Check a GGUF file: what a reader finds in it must be the model in memory.

Fields and tensors are read back with the gguf library; transformers computes the logits, and reads the files too where it knows
the architecture.
"""

import io
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from forge_dist._errors import ExportError
from forge_dist._third_party_logs import quiet_transformers
from forge_dist.adapters._merge import logits_of, relative_difference
from forge_dist.gguf._architectures import Architecture
from forge_dist.gguf._export import Progress, gguf_fields, require_gguf, tensors_to_write
from forge_dist.gguf._layout import FileTensor, gguf_architecture, gguf_tensors
from forge_dist.gguf._reload import Contents, read_contents, reload_gguf
from forge_dist.gguf._tokenizer import Texts, same_texts
from forge_dist.gguf._types import GGUFType, gguf_type, in_blocks, quantize, type_counts
from forge_dist.loading._load import LOADING_ERRORS
from forge_dist.verifying._judge import EXACT
from forge_dist.verifying._tensors import same_bits

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ROUNDED_LOGITS = 0.3
"""Tolerance for a file that rounds to 8 bits or more.

Measured on a 135M-parameter model over random tokens: 2e-3 (float16) and 7e-2 (q8_0). It has little to catch (an overflow of
float16): the bits are proved before, and the configuration with the unrounded weights to EXACT.
"""

FEW_BITS_LOGITS = 2.0
"""Tolerance for a file of 4 or 5 bits, or of a model with experts that rounds at all.

Either may move logits as far as they reach: of tiny random models by 0.8 (q4_0), and by 0.5 where bfloat16 changed which
experts a router takes. It finds what is no number at all.
"""


@attrs.frozen(kw_only=True)
class GGUFCheck:
    """Result of a successful check of a GGUF file."""

    tensors: int
    """Number of tensors in the file, each of them the one in memory, rounded once to the type that the file holds it in."""

    halves: int
    """Number of matrices that are float16 in a file of blocks: the length of their rows is no multiple of 32."""

    matrices: dict[str, int]
    """Type → number of matrices that the file holds in it."""

    difference: float
    """Largest |difference| of two logits of the reloaded model and of the model in memory, relative to the largest |logit|."""

    exact: float
    """The same for the reloaded model with the unrounded weights: at most 1e-5 if its configuration is right."""

    texts: Texts
    """Texts to which the file gives the tokenizer's ids."""

    tolerance: float
    """The largest `difference` that passes: 1e-5 of a float32 file, 0.3 where it rounds; 2 of 4 and 5 bits, and of experts."""


def check_gguf(
    model: "PreTrainedModel",
    file: str | os.PathLike[str],
    samples: Sequence[Sequence[int]],
    *,
    tokenizer: "PreTrainedTokenizerBase",
    dtype: GGUFType,
    name: str,
    progress: Progress | None = None,
    doing: Callable[[str], None] | None = None,
) -> GGUFCheck:
    """Read `file` back and compare it with `model`; further arguments as in `export_gguf`.

    `doing` is told, in words, what is done once all tensors are compared.

    1. Every field is as it was to be written; every tensor equals the one in memory, rounded to the file's type, bit for bit.
    2. The file loads in float32, on the CPU, through transformers or (architectures that it does not read) as the model that
       the file's fields describe, and every tensor of the result is what the file holds.
    3. On `samples`, rows of token ids [S], truncated to the file's context length, its logits are those of the model in memory,
       within what rounding may change; and, with the unrounded weights, within 1e-5 of the largest.

    A second copy of the model is in memory meanwhile.

    Raises:
        ExportError: the first field or tensor that differs, or the logits.
    """
    require_gguf()
    path = Path(os.path.abspath(file))
    arch = gguf_architecture(model, path)
    wanted = tensors_to_write(model, arch, path)
    fields = gguf_fields(model, tokenizer, dtype=dtype, name=name, where=path)
    contents = _prove_file(path, fields, wanted, dtype, progress)
    say = doing or (lambda _: None)
    say(f"loading {path.name} with transformers")
    try:
        # transformers cannot switch off its progress bar over the tensors of a GGUF file.
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            reloaded = reload_gguf(path, model, contents, arch)
    except LOADING_ERRORS as error:
        raise ExportError(f"{path} cannot be read back: {error}") from error
    _prove_reloaded(model, reloaded, contents, path, arch)
    # Beyond a sliding window readers compute other logits than the model; the file's context ends there.
    say(f"comparing the logits of {path.name} with those of the model")
    rows = [row[: contents.fields[f"{arch.name}.context_length"]] for row in samples]
    expected = logits_of(model, rows)
    difference = relative_difference(expected, logits_of(reloaded, rows))
    reloaded.load_state_dict(model.state_dict(), assign=True)
    exact = relative_difference(expected, logits_of(reloaded, rows))
    far = (in_blocks(dtype) and dtype != "q8_0") or "expert_count" in arch.integers
    tolerance = EXACT if dtype == "float32" else FEW_BITS_LOGITS if far else ROUNDED_LOGITS
    for what, apart, allowed in (("", difference, tolerance), (" even with the weights in memory", exact, EXACT)):
        if not apart <= allowed:
            raise ExportError(
                f"{path}{what} does not compute what the model in memory does: logits differ by {apart:.3g} of the largest "
                f"(allowed {allowed:g})"
            )
    counts = type_counts(wanted, dtype)
    halves = counts.get("float16", 0) if in_blocks(dtype) else 0
    return GGUFCheck(
        tensors=len(contents.tensors),
        halves=halves,
        matrices=counts,
        difference=difference,
        exact=exact,
        texts=same_texts(tokenizer),
        tolerance=tolerance,
    )


def _prove_file(
    path: Path, fields: dict[str, Any], wanted: dict[str, FileTensor], dtype: GGUFType, progress: Progress | None
) -> Contents:
    """Return the file's contents, if they are the `fields` and the model's tensors alone."""
    contents = read_contents(path)
    found = contents.fields
    for key in sorted(fields.keys() | found.keys()):
        expected = (
            torch.tensor(fields[key], dtype=torch.float32).item() if isinstance(fields.get(key), float) else fields.get(key)
        )
        if found.get(key) != expected:
            raise ExportError(f"{path}: the field {key} is {str(found.get(key))[:80]} instead of {str(expected)[:80]}")
    if contents.tensors.keys() != wanted.keys():
        raise ExportError(f"{path}: the tensor {min(contents.tensors.keys() ^ wanted.keys())} is missing or too many")
    for done, (key, tensor) in enumerate(wanted.items(), start=1):
        if progress is not None:
            progress(done, len(wanted))
        expected = quantize(tensor.values(), gguf_type(key, tensor.shape, dtype))
        if contents.tensors[key].data.tobytes() != expected.tobytes():
            raise ExportError(f"{path}: the tensor {key} is not the one in memory")
    return contents


def _prove_reloaded(
    model: "PreTrainedModel", reloaded: "PreTrainedModel", contents: Contents, path: Path, arch: Architecture
) -> None:
    """Raise ExportError unless the reloaded model has the tensors of the file."""
    ours, theirs = gguf_tensors(model, arch, path), gguf_tensors(reloaded, arch, path)
    if ours.keys() != theirs.keys() or reloaded.config.tie_word_embeddings != model.config.tie_word_embeddings:
        raise ExportError(f"{path} loads as another model: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    for key, tensor in theirs.items() if arch.by_transformers else ():  # else the file's were just written into it
        if not same_bits(tensor.values(), contents.read(key)):
            raise ExportError(f"{path} loads a tensor {key} that is not the one in the file")
