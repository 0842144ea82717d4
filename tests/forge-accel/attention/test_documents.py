"""Document attention: each packed sample attends to itself alone, as in a call of its own; ordinary calls stay ordinary."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from forge_accel import AttentionError, document_attention

LAYER = SimpleNamespace(is_causal=True)


def states(T, H=9, Hk=3, D=64, B=1, keys=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(B, T, H, D, generator=g).transpose(1, 2)
    key, value = (torch.randn(B, keys or T, Hk, D, generator=g).transpose(1, 2) for _ in range(2))
    return [x.detach().requires_grad_() for x in (query, key, value)]


def ends(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def naive(query, key, value, lengths, window=None, scaling=None, softcap=None, sinks=None):
    """The whole row's scores in float64 under an explicit mask: same sample, not later, not too far back. [1, T, H, D].

    Capped as Gemma 2's, with a sink beside them as gpt-oss's.
    """
    T, groups = query.shape[2], query.shape[1] // key.shape[1]
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(T)
    behind = position[:, None] - position[None, :]
    see = (sample[:, None] == sample[None, :]) & (behind >= 0) & (behind < (window or T + 1))
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    scores = (scores if softcap is None else torch.tanh(scores / softcap) * softcap).masked_fill(~see, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(1, -1, 1, 1).expand(1, -1, T, 1)), -1)
    return (torch.softmax(scores, -1)[..., :T] @ values).transpose(1, 2)


@given(
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=6).filter(sum),
    shape=st.sampled_from([(9, 3, 64), (4, 4, 7), (3, 1, 1), (8, 2, 24)]),
    window=st.none() | st.integers(1, 15),
    scaling=st.none() | st.just(0.31),
    seed=st.integers(0, 99),
)
def test_a_packed_row_agrees_with_the_explicit_mask(lengths, shape, window, scaling, seed):
    """Ragged samples, empty ones among them, grouped heads, odd head sizes, windows: the same as explicit masked scores."""
    H, Hk, D = shape
    query, key, value = states(sum(lengths), H, Hk, D, seed=seed)
    got, weights = document_attention(
        LAYER, query, key, value, None, scaling, sliding_window=window, cu_seq_lens_q=ends(*lengths)
    )
    assert weights is None
    assert got.shape == (1, sum(lengths), H, D)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), naive(query, key, value, lengths, window, scaling), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_gradients_agree_with_the_explicit_mask(window):
    """Query, key and value gradients of a packed row are those of explicit masked scores."""
    lengths = [5, 1, 17, 2, 8]
    inputs = states(sum(lengths))
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    document_attention(LAYER, *inputs, None, sliding_window=window, cu_seq_lens_q=ends(*lengths))[0].square().sum().backward()
    naive(*copies, lengths, window).square().sum().backward()
    largest = max(x.grad.abs().max() for x in copies)
    for got, expected in zip(inputs, copies, strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=2e-6 * float(largest), rtol=0)


@given(
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=6).filter(sum),
    shape=st.sampled_from([(8, 2, 16), (4, 4, 7)]),
    window=st.none() | st.integers(1, 15),
    softcap=st.none() | st.just(1.5),
    sunk=st.booleans(),
    seed=st.integers(0, 99),
)
def test_caps_and_sinks_agree_with_the_explicit_mask(lengths, shape, window, softcap, sunk, seed):
    """Values and gradients of capped scores and of sinks, with windows and grouped heads, are those of explicit scores."""
    inputs = states(sum(lengths), *shape, seed=seed)
    if sunk:
        inputs.append(torch.randn(shape[0], generator=torch.Generator().manual_seed(seed)).mul(2).requires_grad_())
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    got, _ = document_attention(
        LAYER,
        *inputs[:3],
        None,
        0.4,
        sliding_window=window,
        cu_seq_lens_q=ends(*lengths),
        softcap=softcap,
        s_aux=inputs[3] if sunk else None,
    )
    expected = naive(*copies[:3], lengths, window, 0.4, softcap, copies[3] if sunk else None)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)
    weights = torch.linspace(-1, 1, got.numel()).view_as(got)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for ours, theirs in zip(inputs, copies, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", [None, "bool", "additive"])
def test_an_ordinary_call_has_caps_and_sinks_too(mask):
    """A padded batch and a cache are computed with them, under a mask or none."""
    query, key, value = states(4, 4, 2, 16, keys=6)
    sinks = torch.randn(4)
    see = torch.ones(4, 6).tril(2).bool()
    given = {None: None, "bool": see[None, None], "additive": torch.zeros(4, 6).masked_fill(~see, -torch.inf)[None, None]}[mask]
    for softcap in (None, 1.5):
        got, _ = document_attention(LAYER, query, key, value, given, softcap=softcap, s_aux=sinks)
        scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3) / 4
        scores = (scores if softcap is None else torch.tanh(scores / softcap) * softcap).masked_fill(~see, -torch.inf)
        scores = torch.cat((scores, sinks.double().view(1, -1, 1, 1).expand(1, -1, 4, 1)), -1)
        expected = (torch.softmax(scores, -1)[..., :6] @ value.double().repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_query_that_sees_nothing_is_a_number(kind):
    """Places of padding before a prompt see nothing: with a cap, and with sinks of minus infinity, no value becomes NaN."""
    query, key, value = states(4, 4, 2, 16)
    see = torch.ones(4, 4).tril().bool()
    see[:, :2] = False
    mask = see if kind == "bool" else torch.zeros(4, 4).masked_fill(~see, -torch.inf)
    out, _ = document_attention(LAYER, query, key, value, mask[None, None], softcap=1.5)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value))
    sinks = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf])
    plain, _ = document_attention(LAYER, query, key, value)
    sunk, _ = document_attention(LAYER, query, key, value, s_aux=sinks)
    torch.testing.assert_close(sunk[:, :, 0], plain[:, :, 0])
    assert sunk.isfinite().all()


def test_a_sample_does_not_notice_its_neighbours():
    """Changing one sample leaves the others' outputs and gradients the same, to the bit."""
    lengths = [7, 12, 5]
    runs = []
    for seed in (0, 1):
        inputs, other = states(24), states(24, seed=seed)
        with torch.no_grad():
            for x, y in zip(inputs, other, strict=True):
                x[:, :, 7:19] = y[:, :, 7:19]
        out, _ = document_attention(LAYER, *inputs, None, cu_seq_lens_q=ends(*lengths))
        out.square().sum().backward()
        runs.append([out.detach(), *(x.grad.transpose(1, 2) for x in inputs)])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first[:, :7], second[:, :7])
        assert torch.equal(first[:, 19:], second[:, 19:])
        assert not torch.equal(first[:, 7:19], second[:, 7:19])


def test_a_packed_sample_equals_the_sample_alone():
    """Packing is invisible: each sample's output is, to the bit, what an unpacked call gives."""
    lengths = [3, 11, 6]
    inputs = states(20)
    packed, _ = document_attention(LAYER, *inputs, None, cu_seq_lens_q=ends(*lengths))
    parts = zip(*(x.split(lengths, dim=2) for x in inputs), strict=True)
    alone = torch.cat([document_attention(LAYER, *part, None)[0] for part in parts], dim=1)
    assert torch.equal(packed, alone)


def family(groups):
    """Groups of (prompt, [completions]) lengths -> (ends of queries, ends of keys, kv_rows), a prompt in the row once."""
    queries, seen, at = [], [], 0
    for prompt, completions in groups:
        begin, at = at, at + prompt
        for index, length in enumerate(completions):
            queries.append(length + (0 if index else prompt))
            seen.append([*range(begin, begin + prompt), *range(at, at + length)])
            at += length
    return ends(*queries), ends(*map(len, seen)), torch.tensor([row for rows in seen for row in rows])


def naive_rows(query, key, value, ends_q, ends_k, rows, window=None, scaling=None):
    """Each sample's keys gathered one by one, and its scores in float64 under an explicit mask. [1, T, H, D]."""
    groups, outputs = query.shape[1] // key.shape[1], []
    for q0, q1, k0, k1 in zip(*(x.tolist() for x in (ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:])), strict=True):
        keys, values = (x[:, :, rows[k0:k1]].double().repeat_interleave(groups, 1) for x in (key, value))
        behind = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)[None, :]
        see = (behind >= 0) & (behind < (window or k1))
        scores = query[:, :, q0:q1].double() @ keys.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
        outputs.append(torch.softmax(scores.masked_fill(~see, -torch.inf), -1) @ values)
    return torch.cat(outputs, 2).transpose(1, 2)


@given(
    groups=st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=4),
    shape=st.sampled_from([(9, 3, 64), (4, 4, 7), (3, 1, 1)]),
    window=st.none() | st.integers(1, 15),
    scaling=st.none() | st.just(0.31),
    seed=st.integers(0, 99),
)
def test_shared_keys_agree_with_the_explicit_mask(groups, shape, window, scaling, seed):
    """Completions of a prompt that is in the row once see it and themselves, within their windows: values and gradients."""
    ends_q, ends_k, rows = family(groups)
    inputs = states(int(ends_q[-1]), *shape, seed=seed)
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    options = {"sliding_window": window, "cu_seq_lens_q": ends_q, "cu_seq_lens_k": ends_k, "kv_rows": rows}
    got, weights = document_attention(LAYER, *inputs, None, scaling, **options)
    assert weights is None
    expected = naive_rows(*copies, ends_q, ends_k, rows, window, scaling)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)
    pattern = torch.arange(got.numel()).cos().view(got.shape)
    (got * pattern).sum().backward()
    (expected * pattern).sum().backward()
    largest = max(x.grad.abs().max() for x in copies)
    for ours, theirs in zip(inputs, copies, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=3e-6 * float(largest), rtol=0)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5).filter(
        lambda x: sum(map(sum, x))
    ),
    random=st.randoms(use_true_random=False),
)
def test_keys_of_any_rows_are_honoured(lengths, random):
    """kv_rows need not be a prompt's and one's own: any positions in any order, for samples without queries too."""
    ends_q, ends_k = ends(*(q for q, _ in lengths)), ends(*(q + more for q, more in lengths))
    if not ends_q[-1]:
        return
    rows = torch.tensor([random.randrange(int(ends_q[-1])) for _ in range(int(ends_k[-1]))])
    inputs = states(int(ends_q[-1]), 4, 2, 8)
    got, _ = document_attention(LAYER, *inputs, None, cu_seq_lens_q=ends_q, cu_seq_lens_k=ends_k, kv_rows=rows)
    torch.testing.assert_close(got.double(), naive_rows(*inputs, ends_q, ends_k, rows), atol=2e-6, rtol=1e-5)


def test_completions_of_a_prompt_do_not_notice_each_other():
    """Changing one completion leaves the outputs of its prompt and of the other completions the same, to the bit."""
    ends_q, ends_k, rows = family([(6, [4, 3, 5])])
    options = {"cu_seq_lens_q": ends_q, "cu_seq_lens_k": ends_k, "kv_rows": rows}
    inputs = states(18)
    before, _ = document_attention(LAYER, *inputs, None, **options)
    for start, stop in ((6, 10), (10, 13), (13, 18)):
        changed = [x.detach().clone() for x in inputs]
        for x, y in zip(changed, states(18, seed=1), strict=True):
            x[:, :, start:stop] = y[:, :, start:stop]
        after, _ = document_attention(LAYER, *changed, None, **options)
        same = [torch.equal(after[:, at], before[:, at]) for at in range(18)]
        assert same == [not start <= at < stop for at in range(18)]


def test_own_keys_alone_are_the_ordinary_packed_row():
    """kv_rows that name each sample's own positions change nothing, and no key is copied for it."""
    inputs = states(14)
    options = {"cu_seq_lens_q": ends(5, 9), "cu_seq_lens_k": ends(5, 9), "kv_rows": torch.arange(14)}
    got, _ = document_attention(LAYER, *inputs, None, **options)
    assert torch.equal(got, document_attention(LAYER, *inputs, None, cu_seq_lens_q=ends(5, 9))[0])


def test_a_prompt_gathers_its_gradients_in_float32():
    """In bfloat16 the gradients of a prompt's keys from 600 completions add up to their sum, which bfloat16 sums would miss."""
    ends_q, ends_k, rows = family([(1, [1] * 600)])
    inputs = [x.detach().bfloat16().requires_grad_() for x in states(601, 1, 1, 8)]
    with torch.no_grad():
        inputs[0].zero_()  # equal scores: every completion gives half of its gradient to the prompt
    out, _ = document_attention(LAYER, *inputs, None, cu_seq_lens_q=ends_q, cu_seq_lens_k=ends_k, kv_rows=rows)
    out.sum().backward()
    # The prompt's own query, and half from each of the 600.
    torch.testing.assert_close(inputs[2].grad[0, 0, 0].float(), torch.full((8,), 301.0), rtol=4e-3, atol=0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_short_samples_in_bfloat16_are_computed_in_float32(packed, autocast):
    """Outputs and gradients of samples of 1 to 128 tokens are float32's, rounded: torch's own bfloat16 is slow there."""
    lengths = (2, 59, 128) if packed else (59,)
    wide = [x.detach().bfloat16().float().requires_grad_() for x in states(sum(lengths))]
    more = {"cu_seq_lens_q": ends(*lengths)} if packed else {}
    upstream = torch.randn(1, sum(lengths), 9, 64).bfloat16()
    output, _ = document_attention(LAYER, *wide, **more)
    expected = [output, *torch.autograd.grad(output, wide, upstream.float())]
    narrow = [x.detach() if autocast else x.detach().bfloat16() for x in wide]
    for x in narrow:
        x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, _ = document_attention(LAYER, *narrow, **more)
    assert output.dtype == torch.bfloat16
    for got, want in zip([output, *torch.autograd.grad(output, narrow, upstream)], expected, strict=True):
        assert (got.float() - want).norm() <= 2**-8 * want.norm()


@pytest.mark.parametrize("tokens", [1, 129])
def test_long_samples_and_single_queries_are_computed_as_asked(tokens):
    """In bfloat16 a sample of more than 128 tokens, and a query alone, is torch's own bfloat16 attention, bit by bit."""
    query, key, value = (x.detach().bfloat16() for x in states(tokens, keys=129))
    output, _ = document_attention(LAYER, query, key, value)
    own = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=tokens > 1, enable_gqa=True)
    assert torch.equal(output, own.transpose(1, 2))


def test_a_plain_batch_is_causal():
    """Without cu_seq_lens_q a batch of several rows is ordinary causal attention, row by row."""
    query, key, value = states(13, B=3)
    got, _ = document_attention(LAYER, query, key, value, None, position_ids=torch.arange(13).expand(3, 13))
    for row in range(3):
        expected = naive(query[row : row + 1], key[row : row + 1], value[row : row + 1], [13])
        torch.testing.assert_close(got[row : row + 1].double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunks", [[16], [9, *[1] * 7], [4, 5, 7], [1] * 16])
def test_decoding_with_a_cache_repeats_the_whole_call(chunks, window):
    """Prefill and decoding in any steps give what one call over the whole sequence gives."""
    query, key, value = states(16, B=2)
    whole, _ = document_attention(LAYER, query, key, value, None, sliding_window=window)
    parts, done = [], 0
    for chunk in chunks:
        seen = slice(0, done + chunk)
        new = query[:, :, done : done + chunk]
        positions = torch.arange(done, done + chunk).expand(2, chunk)
        options = {"sliding_window": window, "position_ids": positions}
        parts.append(document_attention(LAYER, new, key[:, :, seen], value[:, :, seen], None, **options)[0])
        done += chunk
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [bool, float])
def test_a_mask_of_an_ordinary_call_is_obeyed(kind):
    """A padded batch brings a mask with causality in it, as bools or as what is added to the scores."""
    query, key, value = states(8, B=2)
    see = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8).clone()
    see[1, :, :, :3] = False
    see[1, :, range(3), range(3)] = True
    mask = see if kind is bool else torch.zeros(2, 1, 8, 8).masked_fill(~see, -torch.inf)
    got, _ = document_attention(LAYER, query, key, value, mask, position_ids=torch.tensor([[*range(8)], [1, 1, 1, *range(5)]]))
    alone, _ = document_attention(LAYER, query[1:, :, 3:], key[1:, :, 3:], value[1:, :, 3:], None)
    torch.testing.assert_close(got[1:, 3:], alone, atol=2e-6, rtol=1e-5)


def test_dropout_falls_in_a_packed_row():
    """Dropout is handed on to every sample."""
    query, key, value = states(12)
    out, _ = document_attention(LAYER, query, key, torch.ones_like(value), None, None, 0.97, cu_seq_lens_q=ends(5, 7))
    assert (out == 0).float().mean() > 0.3


def test_a_rank_without_work_gets_an_empty_row():
    """No tokens in, no tokens out, in the right shape."""
    query, key, value = (x[:, :, :0] for x in states(2))
    out, _ = document_attention(LAYER, query, key, value, None, cu_seq_lens_q=torch.zeros(1, dtype=torch.int32))
    assert out.shape == (1, 0, 9, 64)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_what_it_does_not_compute_is_refused(extra, said, packed):
    """A variant of attention that would be left out of the result is an error that names the remedy, packed or not."""
    more = {"cu_seq_lens_q": ends(4, 4)} if packed else {}
    with pytest.raises(AttentionError, match=said) as caught:
        document_attention(LAYER, *states(8), None, **extra, **more)
    assert "attention=eager" in str(caught.value)


def test_a_layer_that_is_not_causal_is_refused():
    """The layer's own word counts where the call says nothing, and the call's where it does."""
    layer = SimpleNamespace(is_causal=False)
    with pytest.raises(AttentionError, match="causal"):
        document_attention(layer, *states(4), None)
    document_attention(layer, *states(4), None, is_causal=True)


def test_what_means_nothing_passes():
    """Arguments that models pass at rest do not trip the refusals."""
    document_attention(
        object(),
        *states(4),
        None,
        softcap=None,
        s_aux=None,
        output_attentions=False,
        cache_position=None,
        cu_seq_lens_q=ends(4),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_mask": torch.ones(1, 8)}, "attention_mask=None"),
        ({"cu_seq_lens_q": ends(4, 3)}, "8 tokens"),
        ({"cu_seq_lens_q": ends(4, 4) + 1}, "8 tokens"),
        ({"cu_seq_lens_q": torch.tensor([1, 5, 8])}, "rise from 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 3, 8])}, "rise"),
        ({"cu_seq_lens_q": ends(4, 4)[None]}, "shape"),
        ({"cu_seq_lens_q": ends(4, 4).float()}, "integers"),
        ({"cu_seq_lens_k": ends(3, 5)}, "without kv_rows"),
        ({"kv_rows": torch.arange(8)}, "kv_rows needs cu_seq_lens_k"),
        ({"kv_rows": torch.arange(8), "cu_seq_lens_k": ends(8)}, "kv_rows needs cu_seq_lens_k"),
        ({"kv_rows": torch.arange(8), "cu_seq_lens_k": ends(4, 4).float()}, "kv_rows needs cu_seq_lens_k"),
        ({"kv_rows": torch.arange(8).float(), "cu_seq_lens_k": ends(4, 4)}, "kv_rows must be int64"),
        ({"kv_rows": torch.arange(8)[None], "cu_seq_lens_k": ends(4, 4)}, r"not torch.int64 \[1, 8\]"),
        ({"kv_rows": torch.arange(8), "cu_seq_lens_k": ends(3, 5)}, "cu_seq_lens_k must rise from 0 to the 8 kv_rows"),
        ({"kv_rows": torch.arange(9), "cu_seq_lens_k": ends(4, 4)}, "cu_seq_lens_k must rise from 0 to the 9 kv_rows"),
        ({"kv_rows": torch.arange(1, 9), "cu_seq_lens_k": ends(4, 4)}, "the row's 8 tokens; they go from 1 to 8"),
        ({"kv_rows": torch.arange(8) - 1, "cu_seq_lens_k": ends(4, 4)}, "they go from -1 to 6"),
        ({"kv_rows": torch.arange(8), "cu_seq_lens_q": None}, "pass cu_seq_lens_q too"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_row_that_contradicts_itself_is_refused(change, said, dtype):
    """A mask beside a packed row, or ends that do not cover it, would mix samples up: an error says which."""
    given = [x.to(dtype) for x in states(8)]
    with pytest.raises(AttentionError, match=said):
        document_attention(LAYER, *given, **{"attention_mask": None, "cu_seq_lens_q": ends(4, 4), **change})


def test_a_cache_beside_a_packed_row_is_refused():
    """More keys than queries in a packed row means a KV cache, which transformers does not keep apart by samples."""
    with pytest.raises(AttentionError, match="use_cache=False"):
        document_attention(LAYER, *states(8, keys=12), None, cu_seq_lens_q=ends(4, 4))


def test_two_packed_rows_are_refused():
    """A packed batch is one flat row."""
    with pytest.raises(AttentionError, match="flatten"):
        document_attention(LAYER, *states(8, B=2), None, cu_seq_lens_q=ends(4, 4))


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1], [0, 1, 2, 3, 9], [0, 0, 0, 0, 0]])
def test_a_packed_row_without_its_ends_is_refused(positions):
    """Positions that restart say that samples are packed; without cu_seq_lens_q they would see each other."""
    with pytest.raises(AttentionError, match="cu_seq_lens_q"):
        document_attention(LAYER, *states(5), None, position_ids=torch.tensor([positions]))


@pytest.mark.parametrize("T", [1, 4])
def test_a_cache_with_room_left_and_no_mask_is_refused(T):
    """A cache of fixed size hands out keys that nobody has written: only a mask can hide them."""
    query, key, value = states(T, keys=9)
    with pytest.raises(AttentionError, match="9 keys, but positions go to 6"):
        document_attention(LAYER, query, key, value, None, position_ids=torch.arange(7 - T, 7)[None])


def test_a_cache_that_forgets_is_no_cache_with_room():
    """The cache of a sliding-window layer holds fewer keys than there are positions."""
    query, key, value = states(1, keys=5)
    got, _ = document_attention(LAYER, query, key, value, None, sliding_window=5, position_ids=torch.tensor([[40]]))
    assert torch.equal(got, document_attention(LAYER, query, key, value, None)[0])


def test_shapes_that_do_not_belong_together_are_refused():
    """The message shows the shapes."""
    query, key, value = states(6)
    with pytest.raises(AttentionError, match=r"\[1, 3, 5, 64\]"):
        document_attention(LAYER, query, key[:, :, :5], value[:, :, :5], None)
    with pytest.raises(AttentionError, match="belong together"):
        document_attention(LAYER, query, key[:, :2], value[:, :2], None)
    with pytest.raises(AttentionError, match="head size"):
        document_attention(LAYER, query[0], key[0], value[0], None)


@pytest.mark.parametrize("variant", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"s_aux": torch.linspace(-1.0, 1.0, 9)}])
def test_the_last_queries_of_samples_with_all_their_keys(variant):
    """What a part of each sample's queries attends to is what they attend to in the whole row, and so are the gradients."""
    whole = [states.requires_grad_() for states in states(14)]
    (query, key, value), lengths, own = whole, (5, 9), (2, 6)
    expected, _ = document_attention(LAYER, *whole, None, cu_seq_lens_q=ends(*lengths), **variant)
    rows = torch.cat([torch.arange(5)[-own[0] :], torch.arange(5, 14)[-own[1] :]])
    given = {"cu_seq_lens_q": ends(*own), "cu_seq_lens_k": ends(*lengths)}
    found, _ = document_attention(LAYER, query[:, :, rows], key, value, None, **given, **variant)
    torch.testing.assert_close(found, expected[:, rows])
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    mine, theirs = (torch.autograd.grad((out * weights).sum(), whole) for out in (found, expected[:, rows]))
    for ours, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("keys", [ends(5, 8), ends(14), ends(1, 13), ends(4, 5, 5)])
def test_keys_that_do_not_fit_their_queries_are_refused(keys):
    """Ends of the keys cover them, and give each sample at least its queries."""
    query, key, value = states(8, keys=14)
    with pytest.raises(AttentionError, match="cu_seq_lens_k must rise from 0 to the 14 keys"):
        document_attention(LAYER, query, key, value, None, cu_seq_lens_q=ends(2, 6), cu_seq_lens_k=keys)
