"""Preferences over tokens, rows of them, and naive losses.
One unpadded completion at a time, full logits, the papers' formulas.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch.nn.functional import logsigmoid
from transformers import AttentionInterface, AttentionMaskInterface

from forge_algos import KTOBatch, PreferenceBatch, train

from .oracle import SIZES, VOCAB, gradients

REWARD_SEED = 7


def some_pairs(number, *, seed=0, longest=7):
    """Return (prompt, chosen, rejected) of random ids, of different lengths from 1."""
    random = np.random.default_rng(seed)
    return [tuple(random.integers(3, VOCAB, random.integers(1, longest + 1)) for _ in range(3)) for _ in range(number)]


def rows_of(groups, *, share=False):
    """Return groups of (prompt, completion) in one row, shaped as `PackedGroups`.
    Every token of a completion is learned.
    """
    ids, positions, rows, targets, lengths, ends, queries, keys, seen = [], [], [], [], [], [], [], [], []
    for group in groups:
        start, prompt_rows = len(ids), []
        for number, (prompt, completion) in enumerate(group):
            begin, new = len(ids), [*completion] if share and number else [*prompt, *completion]
            offset = len(prompt) if share and number else 0
            ids += new
            positions += range(offset, offset + len(new))
            prompt_rows = list(range(start, start + len(prompt))) if offset else []
            own = list(range(begin, begin + len(new)))
            first = own[0] if offset else own[len(prompt)]
            before = start + len(prompt) - 1 if offset else first - 1
            rows += [before, *range(first, first + len(completion) - 1)]
            targets += [*completion]
            lengths.append(len(completion))
            ends.append(own[-1])
            queries.append(len(own))
            keys.append(len(prompt_rows) + len(own))
            seen += prompt_rows + own
    extra = {"kv_rows": None, "cu_seqlens_k": None, "max_seqlen_k": None}
    if share:
        extra = {
            "kv_rows": np.array(seen),
            "cu_seqlens_k": np.cumsum([0, *keys]).astype(np.int32),
            "max_seqlen_k": max(keys),
        }
    return SimpleNamespace(
        input_ids=np.array(ids, np.int64),
        position_ids=np.array(positions, np.int64),
        rows=np.array(rows, np.int64),
        targets=np.array(targets, np.int64),
        lengths=np.array(lengths, np.int64),
        ends=np.array(ends, np.int64),
        group_sizes=np.array([len(group) for group in groups], np.int64),
        cu_seqlens=np.cumsum([0, *queries]).astype(np.int32),
        max_seqlen=max(queries, default=0),
        **extra,
    )


def pair_batch(pairs, *, share=False, **arrays):
    """Return a `PreferenceBatch` of (prompt, chosen, rejected)."""
    groups = rows_of([((prompt, chosen), (prompt, rejected)) for prompt, chosen, rejected in pairs], share=share)
    return PreferenceBatch(groups=groups, **arrays)


def rotated(pairs):
    """Return prompts with the completion of the one before, for estimates of the KL.
    As TRL and the paper have it.
    """
    return [(prompt, before[1]) for (prompt, *_), before in zip(pairs, [*pairs[-1:], *pairs[:-1]], strict=True)]


def kto_batch(pairs, desirable, mismatched, **arrays):
    """Return a `KTOBatch` of (prompt, completion, ...) and of mismatched (prompt, completion)."""
    alone, others = (rows_of([[each[:2]] for each in some]) for some in (pairs, mismatched))
    return KTOBatch(completions=alone, mismatched=others, desirable=np.array(desirable, bool), **arrays)


def a_classifier(*, seed=REWARD_SEED, size=0.2):
    """Return a reward model of ~5,000 random weights."""
    config = transformers.LlamaConfig(**SIZES, num_labels=1)
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForSequenceClassification(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * size)
    return model.train()


def token_logps(model, prompt, completion, *, prompts=False):
    """Return float32[S] of a completion's tokens, from full logits of that sequence.
    Or of all but the first token; gradients flow.
    """
    ids = torch.tensor(np.concatenate([prompt, completion]))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    logps = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    return logps if prompts else logps[len(prompt) - 1 :]


DPO_FORMULAS = {
    "sigmoid": lambda c, r, _m, _n, beta: -logsigmoid(beta * (c - r)),
    "hinge": lambda c, r, _m, _n, beta: torch.relu(1 - beta * (c - r)),
    "ipo": lambda c, r, m, n, beta: (c / m - r / n - 1 / (2 * beta)) ** 2,
    "bco_pair": lambda c, r, _m, _n, beta: -logsigmoid(beta * c) - logsigmoid(-beta * r),
    "apo_zero": lambda c, r, _m, _n, beta: 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r),
    "sppo_hard": lambda c, r, _m, _n, beta: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
}


def naive_dpo(model, pairs, reference, *, beta=0.1, kind="sigmoid"):
    """Return the mean over all pairs, in TRL 1.16's formulas, one pair after another.
    `sft` is a mean over all tokens.
    """
    losses, likelihood, tokens = [], 0.0, 0
    for prompt, *completions in pairs:
        with torch.no_grad():
            ref = [token_logps(reference, prompt, completion).sum() for completion in completions]
        policy = [token_logps(model, prompt, completion).sum() for completion in completions]
        c, r = policy[0] - ref[0], policy[1] - ref[1]
        likelihood, tokens = likelihood - policy[0], tokens + len(completions[0])
        losses.append(DPO_FORMULAS[kind](c, r, *map(len, completions), beta) if kind != "sft" else c * 0)
    return likelihood / tokens if kind == "sft" else torch.stack(losses).mean()


def naive_weight(model, prompt, completions):
    """Return WPO's weight of a pair: the product of exp(mean of log p - log Σ p²), from full logits."""
    weight = 1.0
    with torch.no_grad():
        for y in completions:
            ids = torch.tensor(np.concatenate([prompt, y]))
            given = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(1)
            own = given.gather(1, ids[len(prompt) :, None]).squeeze(1)
            weight = weight * (own - given.exp().square().sum(1).log()).mean().exp()
    return weight


def naive_wpo(model, pairs, reference, *, beta=0.1):
    """Return the mean over pairs of the weighted `sigmoid`, and of the weighted likelihood a token of all."""
    losses, tokens = [], sum(len(chosen) for _, chosen, _ in pairs) / len(pairs)
    for prompt, *completions in pairs:
        loss = naive_dpo(model, [(prompt, *completions)], reference, beta=beta)
        likelihood = -token_logps(model, prompt, completions[0]).sum() / tokens
        losses.append(naive_weight(model, prompt, completions) * (loss + likelihood))
    return torch.stack(losses).mean()


def naive_orpo(model, pairs, *, beta=0.1, learn_prompt=False):
    """Return the likelihood of all chosen tokens plus the mean of -β log σ(log odds ratio)."""
    losses, likelihood, tokens = [], 0.0, 0
    for prompt, *completions in pairs:
        whole = token_logps(model, prompt, completions[0], prompts=learn_prompt)
        likelihood, tokens = likelihood - whole.sum(), tokens + len(whole)
        p, q = (token_logps(model, prompt, completion).mean() for completion in completions)
        losses.append(-beta * logsigmoid((p - torch.log1p(-p.exp())) - (q - torch.log1p(-q.exp()))))
    return likelihood / tokens + torch.stack(losses).mean()


def naive_simpo(model, pairs, *, beta=2.0, gamma=1.0):
    """Return the mean over pairs of -log σ(β(p - q) - γ)."""
    losses = []
    for prompt, *completions in pairs:
        p, q = (token_logps(model, prompt, completion).mean() for completion in completions)
        losses.append(-logsigmoid(beta * (p - q) - gamma))
    return torch.stack(losses).mean()


def naive_kto(model, pairs, desirable, mismatched, reference, *, beta=0.1, weights=(1.0, 1.0), kl=None):
    """Return the mean over completions around the KL of all mismatched ones together, or around `kl`."""
    with torch.no_grad():
        drift = [(token_logps(model, *pair).sum() - token_logps(reference, *pair).sum()) for pair in mismatched]
    kl = torch.stack(drift).mean().clamp(min=0) if kl is None else kl
    losses = []
    for (prompt, completion, *_), good in zip(pairs, desirable, strict=True):
        with torch.no_grad():
            ref = token_logps(reference, prompt, completion).sum()
        ratio = token_logps(model, prompt, completion).sum() - ref
        losses.append(
            weights[0] * (1 - torch.sigmoid(beta * (ratio - kl)))
            if good
            else weights[1] * (1 - torch.sigmoid(beta * (kl - ratio)))
        )
    return torch.stack(losses).mean()


def naive_reward(model, pairs, *, margins=None, centering=0.0):
    """Return -log σ(r_c - r_r - m) + λ(r_c + r_r)², from the classifier on single sequences."""
    losses = []
    for number, (prompt, *completions) in enumerate(pairs):
        c, r = (
            model(input_ids=torch.tensor(np.concatenate([prompt, completion]))[None], use_cache=False).logits[0, 0]
            for completion in completions
        )
        margin = 0.0 if margins is None else float(margins[number])
        losses.append(-logsigmoid(c - r - margin) + centering * (c + r) ** 2)
    return torch.stack(losses).mean()


def plain_attention(module, query, key, value, attention_mask, cu_seq_lens_q=None, cu_seq_lens_k=None, kv_rows=None, **kwargs):
    """Compute attention segment by segment from its definition.
    With `kv_rows` over the keys that it names; a row without boundaries is one segment.
    """
    if cu_seq_lens_q is None:
        cu_seq_lens_q = cu_seq_lens_k = torch.tensor([0, query.shape[2]])
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if kv_rows is not None:
        key, value = key[:, :, kv_rows], value[:, :, kv_rows]
    found = []
    for (a, b), (c, d) in zip(spans(cu_seq_lens_q), spans(cu_seq_lens_k), strict=True):
        scores = query[0, :, a:b] @ key[0, :, c:d].transpose(1, 2) / math.sqrt(query.shape[-1])
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        found.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[0, :, c:d])
    return torch.cat(found, 1).transpose(0, 1)[None].contiguous(), None


def spans(boundaries):
    return list(itertools.pairwise(boundaries.tolist()))


def shareable(model):
    """Return the same model with an attention that knows shared prompts."""
    AttentionInterface.register("plain", plain_attention)
    AttentionMaskInterface.register("plain", lambda *_args, **_kwargs: None)
    model.config._attn_implementation = "plain"
    return model


def one_step(model, objective, micro_batches, **kind):
    """Return (the loop's output of one step, its gradients), at a learning rate of 0."""
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for rank in [kind["parallel"]] if "parallel" in kind else []:
        rank.parameters = list(model.parameters())
    (output,) = train(
        model, [micro_batches], objective=objective, optimizer=optimizer, scheduler=scheduler, max_grad_norm=0.0, **kind
    )
    return output, gradients(model)


def loss_and_gradients(model, loss):
    """Return (the loss, its gradients) of a scalar that the naive computation gave."""
    model.zero_grad()
    loss.backward()
    return loss.item(), gradients(model)
