"""The operator that a compiled graph calls on a CPU, against document attention itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forge_accel import AttentionError, document_attention
from forge_accel.attention._opaque import _documents, opaque_attention

LAYER = SimpleNamespace(is_causal=True)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("lengths", "keys"), [((5, 1, 8), None), ((14,), None), ((4, 0, 3), (6, 2, 3))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_document_attention(window, lengths, keys, dtype):
    """With windows, grouped heads, empty samples, and more keys than queries."""
    torch.manual_seed(0)
    ends, ends_k = (None if n is None else torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (lengths, keys))
    sizes = ((4, sum(lengths)), *[(2, sum(keys or lengths))] * 2)
    drawn = [torch.randn(1, heads, tokens, 8).to(dtype) for heads, tokens in sizes]
    results = []
    for opaque in (True, False):
        states = [state.clone().requires_grad_() for state in drawn]
        if opaque:
            out = opaque_attention(*states, ends, ends_k, window=window, scaling=0.3)
        else:
            more = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends if ends_k is None else ends_k, "scaling": 0.3}
            out, _ = document_attention(LAYER, *states, sliding_window=window, **more)
        (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out.detach(), *(state.grad for state in states)])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_the_operator_is_registered_as_torch_asks():
    """torch's own check of an operator: schema, autograd, and shapes without numbers."""
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    states = [torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(_documents, (*states, ends, ends, 0, 0.3))


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
