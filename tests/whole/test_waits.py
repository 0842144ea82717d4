"""What a device would have to wait for, counted on the host: values read back, exchanges, kernels in probes and in training."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import forge_algos
import forge_dist
import forge_packing
from forge_accel import document_attention

from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import RUN

CPU = torch.device("cpu")
READS = {"_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select", "unique_consecutive", "_unique2"}
"""Operations after which the host knows a value of the device, or a size that follows from one."""


class Reads(TorchDispatchMode):
    """Counts the operations for which a host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in READS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Kernel:
    """Stand-in for torch's variable-length kernel: documents apart by a mask, and nothing read back. Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends: torch.Tensor,
        ends_k: torch.Tensor,
        most: int,
        most_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        assert query.dtype == torch.bfloat16
        self.calls += 1
        queries, keys = torch.arange(len(query)), torch.arange(len(key))
        of, of_k = torch.bucketize(queries, ends, right=True), torch.bucketize(keys, ends_k, right=True)
        # The last query of a document is at its last key.
        place, place_k = queries - ends[of], keys - ends_k[of_k]
        see = (of[:, None] == of_k) & (place_k <= place[:, None])
        states = (state.transpose(0, 1)[None] for state in (query, key, value))
        return scaled_dot_product_attention(*states, attn_mask=see, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)


@pytest.fixture
def loaded(model_dir: Path) -> tuple[Any, Kernel]:
    """A model in float32 whose attention has a kernel for 16 bits, as on a GPU."""
    kernel = Kernel()
    function = partial(document_attention, varlen_kernel=kernel)
    path = str(model_dir)
    model = forge_dist.load_model(path, dtype=torch.float32, device=CPU, attention="documents", attention_function=function)
    return model, kernel


def rows(number: int, vocabulary: int) -> list[Any]:
    """Micro-batches of three documents each."""
    draw = np.random.default_rng(number)
    made = []
    for _ in range(number):
        ids = [draw.integers(0, vocabulary, size) for size in (5, 9, 4)]
        made.append(forge_packing.collate([SimpleNamespace(input_ids=each, labels=each) for each in ids]))
    return made


def train(model: Any, steps: list[list[Any]]) -> list[Any]:
    """Run steps in bfloat16 as a GPU would."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    given = {"objective": forge_algos.SFT(), "optimizer": optimizer, "scheduler": constant, "device": CPU}
    return list(forge_algos.train(model, steps, autocast=partial(torch.autocast, "cpu", torch.bfloat16), **given))


def test_the_kernel_that_trains_is_probed(loaded: tuple[Any, Kernel]) -> None:
    """Documents apart and shared prompts are tried by the kernel that trains, which float32 weights do not reach alone."""
    model, kernel = loaded
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    packed, why = forge_algos.keep_documents_apart(model, device=CPU, autocast=autocast)
    assert packed, why
    layers = len(model.model.layers)
    assert kernel.calls >= 2 * layers, "two rows of two documents"
    kernel.calls = 0
    shares, why = forge_algos.shares_prompts(model, device=CPU, autocast=autocast)
    assert shares, why
    assert kernel.calls >= 2 * layers
    kernel.calls = 0
    train(model, [rows(1, model.config.vocab_size)])
    assert kernel.calls >= layers


def test_a_kernel_that_mixes_documents_is_found(loaded: tuple[Any, Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is wrong, which runs in 16 bits alone, does not pass for the right attention beside it."""
    model, _ = loaded
    right = Kernel.__call__

    def mixing(
        self: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: Any, *rest: Any, **how: Any
    ) -> Any:
        whole = torch.tensor([0, len(query)], dtype=torch.int32)
        return right(self, query, key, value, whole, whole, *rest[1:], **how)

    monkeypatch.setattr(Kernel, "__call__", mixing)
    forge_algos.keep_documents_apart(model, device=CPU, packing="on")
    fresh = model.__class__(model.config)
    with pytest.raises(forge_algos.PackedBatchError, match="otherwise than alone"):
        forge_algos.keep_documents_apart(
            fresh, device=CPU, packing="on", autocast=partial(torch.autocast, "cpu", torch.bfloat16)
        )


@pytest.mark.slow
def test_a_micro_batch_waits_for_nothing(loaded: tuple[Any, Kernel]) -> None:
    """However many micro-batches a step has, the host reads no value back for any of them."""
    model, _ = loaded
    found = []
    for number in (1, 5):
        # The first step has the probes.
        batches = rows(2 * number, model.config.vocab_size)
        train(model, [batches[:number]])
        with Reads() as seen:
            train(model, [batches[:number], batches[number:]])
        found.append(seen.found)
    assert found[0] == found[1], "reads that grow with the micro-batches"


def exchanges(settings: dict[str, Any]) -> int:
    """Run `forge.sft`, and return how often ranks exchanged numbers of the host."""
    import forge
    from forge_dist.ranks import _collectives as collectives

    made, gather = [], collectives.gather_padded

    def counted(*given: Any) -> Any:
        made.append(given[3].type)
        return gather(*given)

    collectives.gather_padded = counted
    try:
        forge.sft(**settings)
    finally:
        collectives.gather_padded = gather
    assert set(made) == {"cpu"}
    return len(made)


@pytest.mark.slow
def test_exchanges_of_a_step(model_dir: Path, tmp_path: Path) -> None:
    """A step has three exchanges of host numbers: what it will learn, what it learned, and whether to save or to stop."""
    data = write_rows(tmp_path / "rows.jsonl", conversations(12))
    own = {"num_epochs": None, "effective_batch_size": 6, "full_state_every_steps": 0, "strategy": "ddp"}
    own["accelerate_full_state_at_epoch"] = False
    given = {"model_path": str(model_dir), "data_path": str(data), **RUN, **own}
    counts = [
        run_on_ranks(exchanges, 2, {**given, "max_steps": steps, "ckpt_output_dir": str(tmp_path / str(steps))}, joined=False)
        for steps in (2, 5)
    ]
    assert counts[1][0] - counts[0][0] == 3 * 3
