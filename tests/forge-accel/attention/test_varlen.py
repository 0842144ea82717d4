"""The arguments of torch's variable-length kernel, seen by a stand-in that computes what the kernel documents."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from forge_accel import AttentionError, document_attention
from forge_accel.attention._varlen import find_kernel, with_grouped_heads

LAYER = SimpleNamespace(is_causal=True)
ENDS = torch.tensor([0, 5, 6, 14], dtype=torch.int32)


def with_kernel(kernel):
    """Document attention as the CUDA accelerator hands it out."""
    return partial(document_attention, varlen_kernel=kernel)


def attend(query, key, value, cu_seq_q, cu_seq_k, scale, window_size):
    """Flash attention's contract, in float32 loops over samples: [T, H, D], the last query at the last key.

    The window is (left, right) of one's own position.
    """
    groups, outputs = query.shape[1] // key.shape[1], []
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    for q, k, v in zip(
        *(x.float().split(cu.diff().tolist()) for x, cu in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))), strict=True
    ):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        behind = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])[None, :]
        left, right = window_size
        see = ((behind <= left) | (left < 0)) & ((-behind <= right) | (right < 0))
        scores = (q @ k.transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)).masked_fill(~see, -torch.inf)
        outputs.append((torch.softmax(scores, -1) @ v).transpose(0, 1).to(query.dtype))
    return torch.cat(outputs)


class Kernel213:
    """varlen_attn's signature as of torch 2.13, and a record of its calls."""

    def __init__(self):
        self.calls = []

    def __call__(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        assert enable_gqa or query.shape[1] == key.shape[1]
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (cu_seq_q[-1], cu_seq_k[-1]) == (len(query), len(key))
        assert {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}
        assert isinstance(max_q, int)
        assert isinstance(max_k, int)
        self.calls.append({"max": max_q, "max_k": max_k, "window": window_size, "gqa": enable_gqa, "scale": scale})
        return attend(query, key, value, cu_seq_q, cu_seq_k, scale, window_size)


class Kernel211(Kernel213):
    """The same as of torch 2.11: heads must be equal in number."""

    def __call__(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        seqused_k=None,
    ):  # fmt: skip
        return super().__call__(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def states(dtype=torch.bfloat16, D=16, T=14):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, T, h, D, generator=g).transpose(1, 2).to(dtype) for h in (6, 2, 2)]


@pytest.mark.parametrize("kernel", [Kernel211, Kernel213])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 50])
def test_the_kernel_is_asked_for_what_documents_are(kernel, window):
    """By causality, window, scale, grouped heads and ends the kernel computes document attention, on either torch."""
    kernel = kernel()
    inputs = states()
    options = {"sliding_window": window, "cu_seq_lens_q": ENDS, "max_length_q": 8}
    got, weights = with_kernel(kernel)(LAYER, *inputs, None, 0.4, **options)
    assert weights is None
    assert got.shape == (1, 14, 6, 16)
    expected, _ = document_attention(LAYER, *(x.float() for x in inputs), None, 0.4, **options)
    torch.testing.assert_close(got.float(), expected, atol=0.02, rtol=0.02)
    assert len(kernel.calls) == 1
    assert kernel.calls[0]["max"] == 8


SHARED = {
    "cu_seq_lens_q": torch.tensor([0, 5, 9, 14], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 5, 12, 17], dtype=torch.int32),
    "kv_rows": torch.tensor([*range(5), 0, 1, 2, *range(5, 9), *range(9, 14)]),
}
"""A prompt of 3 with completions of 2 and 4, and a sample by itself."""


@pytest.mark.parametrize("kernel", [Kernel211, Kernel213])
@pytest.mark.parametrize("window", [None, 1, 4, 6, 7, 50])
@pytest.mark.parametrize("longest", [{}, {"max_length_q": 5, "max_length_k": 7}])
def test_shared_keys_are_gathered_for_the_kernel(kernel, window, longest):
    """Keys by kv_rows, their own ends and their own longest: the kernel's answer is document attention's, its gradients too."""
    kernel = kernel()
    inputs = [x.requires_grad_() for x in states()]
    copies = [x.detach().float().requires_grad_() for x in inputs]
    got, _ = with_kernel(kernel)(LAYER, *inputs, None, sliding_window=window, **SHARED, **longest)
    expected, _ = document_attention(LAYER, *copies, None, sliding_window=window, **SHARED)
    torch.testing.assert_close(got.float(), expected, atol=0.02, rtol=0.02)
    assert [(call["max"], call["max_k"]) for call in kernel.calls] == [(5, 7)]
    # A window as long as the queries but not as the keys is not left out.
    assert kernel.calls[0]["window"] == ((window - 1, 0) if window in {1, 4, 6} else (-1, 0))
    got.float().square().sum().backward()
    expected.square().sum().backward()
    largest = max(x.grad.abs().max() for x in copies)
    for ours, theirs in zip(inputs, copies, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, atol=0.02 * float(largest), rtol=0.02)


def test_shared_keys_that_the_kernel_cannot_take_go_sample_by_sample():
    """In float32 as in a row that shares nothing."""
    kernel = Kernel213()
    got, _ = with_kernel(kernel)(LAYER, *states(torch.float32), None, **SHARED)
    assert not kernel.calls
    assert torch.equal(got, document_attention(LAYER, *states(torch.float32), None, **SHARED)[0])


def test_a_window_that_no_sample_outgrows_is_plain_causal():
    """The kernel's causal path needs (-1, 0), so a window of the longest sample or more is not passed on."""
    kernel = Kernel213()
    for window in (None, 7, 8, 4096):
        with_kernel(kernel)(LAYER, *states(), None, cu_seq_lens_q=ENDS, max_length_q=8, sliding_window=window)
    assert [call["window"] for call in kernel.calls] == [(-1, 0), (6, 0), (-1, 0), (-1, 0)]


def test_the_longest_sample_is_found_where_it_is_not_given():
    """Without max_length_q the ends are read."""
    kernel = Kernel213()
    with_kernel(kernel)(LAYER, *states(), None, cu_seq_lens_q=ENDS.long())
    assert kernel.calls[0]["max"] == 8
    assert kernel.calls[0]["gqa"] is True


def test_autocast_reaches_the_kernel():
    """Autocast casts SDPA's arguments but not the kernel's: float32 queries under bf16 autocast are cast here."""
    kernel = Kernel213()
    query, key, value = states(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = with_kernel(kernel)(LAYER, query, key, value.bfloat16(), None, cu_seq_lens_q=ENDS)
    assert kernel.calls
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (states(torch.float32), {"cu_seq_lens_q": ENDS}),
        (states(D=12), {"cu_seq_lens_q": ENDS}),
        (states(D=264), {"cu_seq_lens_q": ENDS}),
        (states(), {}),
        (states(T=0), {"cu_seq_lens_q": torch.zeros(1, dtype=torch.int32)}),
    ],
)
def test_what_the_kernel_cannot_do_goes_sample_by_sample(inputs, options):
    """float32, odd or huge heads, ordinary calls and empty rows get document attention's own answer."""
    kernel = Kernel213()
    got, _ = with_kernel(kernel)(LAYER, *inputs, None, **options)
    assert not kernel.calls
    assert torch.equal(got, document_attention(LAYER, *inputs, None, **options)[0])


def test_dropout_goes_sample_by_sample():
    """The kernel has no dropout."""
    kernel = Kernel213()
    out, _ = with_kernel(kernel)(LAYER, *states(), None, None, 0.97, cu_seq_lens_q=ENDS)
    assert not kernel.calls
    assert (out == 0).float().mean() > 0.3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"attention_mask": torch.ones(1, 14)}, "attention_mask=None"),
        ({"is_causal": False}, "is_causal"),
        ({"cu_seq_lens_k": ENDS + 1}, "cu_seq_lens_k"),
        ({"kv_rows": torch.arange(14)}, "kv_rows needs cu_seq_lens_k"),
        ({"kv_rows": torch.arange(14), "cu_seq_lens_q": None}, "pass cu_seq_lens_q too"),
    ],
)
def test_the_refusals_come_before_the_kernel(extra, message):
    """What document attention refuses is refused here too."""
    kernel = Kernel213()
    with pytest.raises(AttentionError, match=message):
        with_kernel(kernel)(LAYER, *states(), **{"attention_mask": None, "cu_seq_lens_q": ENDS, **extra})
    assert not kernel.calls


def test_the_installed_kernel_takes_these_arguments():
    """torch's own signature binds the call; only its CUDA kernel is missing here, so a meta device answers with the shape."""
    kernel = find_kernel()
    assert kernel is not None
    inputs = [x.to("meta") for x in states()]
    ends = ENDS.to("meta")
    out, _ = with_kernel(kernel)(
        LAYER, *inputs, None, 0.4, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=8, sliding_window=3
    )
    assert out.shape == (1, 14, 6, 16)
    shared = {name: x.to("meta") for name, x in SHARED.items()}
    out, _ = with_kernel(kernel)(LAYER, *inputs, None, max_length_q=5, max_length_k=7, **shared)
    assert out.shape == (1, 14, 6, 16)


def kernel_as(takes):
    """A kernel of torch 2.13's signature or 2.11's, which takes grouped heads or does not; and its calls with grouped heads."""
    grouped = []

    def attended(query, key, value, cu_seq_q, cu_seq_k, scale, window_size, enable_gqa):
        if query.shape[1] != key.shape[1]:
            grouped.append(enable_gqa)
            if takes == "no":
                raise RuntimeError("Number of heads in key/value must equal the number of heads in query")
            if takes == "wrongly":
                key, value = key.flip(0), value.flip(0)
        return attend(query, key, value, cu_seq_q, cu_seq_k, scale, window_size)

    def of_213(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        return attended(q, k, v, cu_q, cu_k, scale, window_size, enable_gqa)

    def of_211(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return attended(q, k, v, cu_q, cu_k, scale, window_size, None)

    return of_213, of_211, grouped


@pytest.mark.parametrize("takes", ["yes", "no", "wrongly"])
@pytest.mark.parametrize("release", [213, 211])
def test_grouped_heads_are_tried(release, takes):
    """Whether the kernel takes fewer key heads than query heads is seen in a call, not in its signature: what it refuses, or
    computes otherwise, is repeated before the call. The answer is that of document attention either way.
    """
    of_213, of_211, grouped = kernel_as(takes)
    kernel = with_grouped_heads(of_213 if release == 213 else of_211, torch.device("cpu"))
    assert grouped, "nothing was tried"
    grouped.clear()
    query, key, value = states()
    got, _ = with_kernel(kernel)(LAYER, query, key, value, None, cu_seq_lens_q=ENDS)
    assert len(grouped) == (1 if takes == "yes" else 0)
    expected, _ = document_attention(LAYER, query.float(), key.float(), value.float(), None, cu_seq_lens_q=ENDS)
    assert torch.allclose(got.float(), expected, atol=0.05)


def test_a_kernel_that_cannot_be_tried_stays():
    """Where no call works, as without the device, the kernel is what it was."""

    def absent(*_states, **_how):
        raise RuntimeError("no such device")

    assert with_grouped_heads(absent, torch.device("cpu")) is absent
