"""The operator that a compiled graph calls on a CPU, against document attention itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forge_accel import AttentionError, document_attention
from forge_accel.attention import _opaque
from forge_accel.attention._opaque import _documents, _documents_backward, _samples, opaque_attention

LAYER = SimpleNamespace(is_causal=True)


def drawn(layout, *sizes, dtype=torch.float32):
    """Random states [1, heads, tokens, 8] for (heads, tokens); in memory heads lie outside, tokens do, or channels do."""
    torch.manual_seed(0)
    order = {"heads": (1, 2, 3), "tokens": (2, 1, 3), "channels": (3, 1, 2)}[layout]
    back = [0, *(1 + order.index(at) for at in (1, 2, 3))]
    made = []
    for heads, tokens in sizes:
        shape = (1, heads, tokens, 8)
        made.append(torch.randn(1, *(shape[at] for at in order)).permute(back).to(dtype))
    return made


LAYOUTS = ["heads", "tokens", "channels"]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("lengths", "keys"), [((5, 1, 8), None), ((14,), None), ((4, 0, 3), (6, 2, 3)), ((131, 4), (140, 4))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients_are_those_of_document_attention(window, lengths, keys, dtype, layout):
    """Those of float32: with windows, grouped heads, empty samples, more keys than queries, tensors that lie otherwise."""
    ends, ends_k = (None if n is None else torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (lengths, keys))
    given = drawn(layout, (4, sum(lengths)), *[(2, sum(keys or lengths))] * 2, dtype=dtype)
    results = []
    for opaque in (True, False):
        states = [(state.detach() if opaque else state.float()).requires_grad_() for state in given]
        if opaque:
            out = opaque_attention(*states, ends, ends_k, window=window, scaling=0.3)
        else:
            more = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends if ends_k is None else ends_k, "scaling": 0.3}
            out, _ = document_attention(LAYER, *states, sliding_window=window, **more)
        (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out.detach(), *(state.grad for state in states)])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs, **tolerance)


def test_bfloat16_is_attended_in_few_lengths(monkeypatch):
    """Each thread of torch's kernel keeps compiled products for the rest of every length: samples are multiples of 32."""
    seen = []

    def recorded(*states):
        found = in_whole_blocks(*states)
        seen.append([each if each is None else tuple(each.shape[2:]) for each in found])
        return found

    in_whole_blocks = _opaque._in_whole_blocks
    monkeypatch.setattr(_opaque, "_in_whole_blocks", recorded)
    lengths, keys = torch.tensor([0, 130, 290, 310]), torch.tensor([0, 130, 300, 320])
    states = drawn("tokens", (4, 310), (2, 320), (2, 320), dtype=torch.bfloat16)
    opaque_attention(*states, lengths, keys, window=None, scaling=None)
    assert seen == [[(160, 8)] * 3 + [None], [(160, 8), (192, 8), (192, 8), (160, 192)]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # within torch 2.15's own check
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operator_is_registered_as_torch_asks(layout):
    """torch's own check of an operator: schema, autograd, and shapes and strides without numbers."""
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    states = [state.requires_grad_() for state in drawn(layout, (4, 7), (2, 7), (2, 7))]
    torch.library.opcheck(_documents, (*states, ends, ends, 0, 0.3))
    out, sums = _documents(*states, ends, ends, 0, 0.3)
    given = (out, *states, out, sums)
    torch.library.opcheck(_documents_backward, (*(each.detach() for each in given), ends, ends, 0, 0.3))


def test_keys_are_kept_once_for_the_query_heads_that_share_them():
    """Autograd keeps queries, keys, values, output and logsumexp, in the dtype and with the heads that they have."""
    kept = []
    states = [state.requires_grad_() for state in drawn("tokens", (9, 40), (3, 40), (3, 40), dtype=torch.bfloat16)]
    ends = torch.tensor([0, 10, 40], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        document_attention(LAYER, *states, cu_seq_lens_q=ends)
    assert sum(kept) == 2 * 40 * 8 * (9 + 3 + 3 + 9) + 4 * 40 * 9 + 2 * ends.nbytes


def test_masks_of_a_window_grow_with_it_and_not_with_the_sample():
    """A sample of many windows is computed block by block: no mask of its length squared."""
    (query,) = drawn("tokens", (1, 1000))
    ends = torch.tensor([0, 1000], dtype=torch.int32)
    masks = [mask for *_, mask in _samples(query, query, ends, ends, 30) if mask is not None]
    assert max(mask.numel() for mask in masks) < 30 * 60


def test_ends_that_do_not_cover_the_row_are_refused():
    """The operator checks what document attention checks."""
    states = [torch.randn(1, 2, 7, 8) for _ in range(3)]
    with pytest.raises(AttentionError, match="must rise from 0 to the row's 7 tokens"):
        opaque_attention(*states, torch.tensor([0, 3, 6], dtype=torch.int32), None, window=None, scaling=None)


def test_a_graph_does_not_ask_whether_there_is_autocast(monkeypatch):
    """torch 2.11 cannot trace that question: attention, in one graph, is what it is without a graph."""
    known, compiling = torch.amp.is_autocast_available, torch.compiler.is_compiling

    def asked(kind):
        assert not compiling()
        return known(kind)

    states = [torch.randn(1, heads, 7, 8) for heads in (4, 2, 2)]
    more = {"cu_seq_lens_q": torch.tensor([0, 3, 7], dtype=torch.int32)}
    with torch.autocast("cpu", torch.bfloat16):
        plain, _ = document_attention(LAYER, *states, **more)
        monkeypatch.setattr(torch.amp, "is_autocast_available", torch.compiler.disable(asked))
        graph = torch.compile(lambda *given: document_attention(LAYER, *given, **more)[0], backend="eager", fullgraph=True)
        assert torch.equal(graph(*states), plain)
