"""Compare the kernel of the losses, interpreted by Triton, with the operators in float64; print the worst errors as JSON.

A script: Triton decides while it is imported whether it interprets.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

os.environ["TRITON_INTERPRET"] = "1"

import torch

from forge_algos.losses import _score_rows as kernel, nll, nll_of_logits
from forge_algos.losses._likelihood import Likelihood, score_in_place

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIANTS = [
    Likelihood(dft=dft, label_smoothing=smoothing, z_loss=z_loss)
    for dft, smoothing, z_loss in itertools.product((False, True), (0.0, 0.1), (0.0, 1e-3))
]
BLOCK = 64
LAUNCH = kernel.launch


def drawn(rows: int, columns: int) -> torch.Tensor:
    """Logits: plain ones, a row far from zero, one whose numbers are far apart, one in which two are the greatest."""
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * 3
    logits[1:2] += 1e4
    logits[2:3] *= 3e3
    logits[3:, [0, -1]] = 20
    return logits


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Greatest norm of a row's difference over that of the row; of a row of zeros, over 1."""
    ours, exact = (each.double().reshape(len(exact), -1) for each in (ours, exact))
    norms = exact.norm(dim=1)
    return float(((ours - exact).norm(dim=1) / torch.where(norms > 1e-6, norms, 1.0)).max())


def single_calls() -> dict[str, float]:
    """Worst errors of scores and of slopes over sizes, variants, weights and dtypes."""
    worst: dict[str, float] = defaultdict(float)
    sizes = [(4, 3 * BLOCK + 5), (4, 2 * BLOCK), (1, BLOCK - 3), (3, BLOCK + 1)]
    dtypes = (None, torch.float32, torch.bfloat16, torch.float16)
    for (rows, columns), likelihood, weighted in itertools.product(sizes, VARIANTS, (False, True)):
        logits = drawn(rows, columns)
        targets = torch.tensor([0, columns - 1, columns // 2, columns - 1])[:rows]
        weights = torch.tensor([2.0, 0.5, 1.0, 0.0])[:rows] if weighted else None
        exact_slope, exact = logits.double(), torch.empty(3, rows, dtype=torch.float64)
        wide = None if weights is None else weights.double()
        score_in_place(exact_slope, targets, likelihood, wide, tuple(exact), slope=True)
        for dtype in dtypes:
            given, found = logits.clone(), torch.full((3, rows), float("nan"))
            slope = kernel.score_rows(given, targets, likelihood, weights, tuple(found), slope=dtype)
            name = "none" if dtype is None else str(dtype).removeprefix("torch.")
            for part, ours, theirs in zip(("loss", "nll", "correct"), found, exact, strict=True):
                worst[part] = max(worst[part], relative(ours[:, None], theirs[:, None]))
            if dtype is None:
                assert slope is None
                assert torch.equal(given, logits)
                continue
            assert slope.dtype == dtype
            assert (slope is given) == (dtype == torch.float32)
            # float16 has no small numbers, in which a whole row of dft's may lie.
            theirs = exact_slope.half() if dtype == torch.float16 else exact_slope
            worst[name] = max(worst[name], relative(slope, theirs))
    return dict(worst)


def whole_losses() -> dict[str, float]:
    """Worst errors of sums, figures and gradients of whole losses against the same by operators."""
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randn, generator=generator)
    hidden_TD, weight_VD, bias_V = draw(9, 6), draw(200, 6), draw(200)
    targets = torch.randint(0, 200, (9,), generator=generator)
    weights = torch.linspace(0, 2, 9)
    found: dict[str, float] = {}
    cases = {
        "bfloat16": (torch.bfloat16, False, {}),
        "float16 in variants": (torch.float16, False, {"dft": True, "label_smoothing": 0.1, "z_loss": 1e-3}),
        "float32 weighted": (torch.float32, False, {"token_weights": weights}),
        "softcap": (torch.bfloat16, False, {"softcap": 3.0}),
        "scale": (torch.bfloat16, False, {"scale": 0.25, "token_weights": weights}),
        "bias": (torch.bfloat16, True, {}),
    }
    for name, (dtype, with_bias, options) in cases.items():
        results = []
        for by_kernel in (False, True):
            tensors = [each.to(dtype, copy=True).requires_grad_() for each in (hidden_TD, weight_VD, bias_V)]
            with scored(by_kernel=by_kernel):
                bias = tensors[2] if with_bias else None
                terms = nll(tensors[0], tensors[1], targets, bias=bias, chunk_rows=4, **options)
                terms.sum.backward()
            grads = [each.grad for each in tensors if each.grad is not None]
            results.append([terms.sum.detach(), *terms.stats.values(), *grads])
        found[name] = max(relative(ours[None], theirs[None]) for theirs, ours in zip(*results, strict=True))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            logits = draw(5, 200).bfloat16()
            sums = []
            for by_kernel in (False, True):
                with scored(by_kernel=by_kernel):
                    sums.append(nll_of_logits(logits, targets[:5]).sum)
        found[context.__name__] = relative(sums[1][None], sums[0][None])
    return found


@contextmanager
def scored(*, by_kernel: bool) -> Iterator[None]:
    """Let the losses inside run by the kernel, or by operators."""
    before, kernel._has_kernel = kernel._has_kernel, lambda *_: by_kernel
    try:
        yield
    finally:
        kernel._has_kernel = before


def outside() -> bool:
    """Whether targets outside of the vocabulary make NaN of the loss and of the slope, and of no other row's."""
    logits, found = drawn(3, 100), torch.empty(3, 3)
    slope = kernel.score_rows(logits, torch.tensor([100, 5, -100]), Likelihood(), None, tuple(found), slope=torch.float32)
    return found[0].isnan().tolist() == slope.isnan().all(1).tolist() == [True, False, True]


def impossible() -> bool:
    """Whether a token with a logit of -inf has the slope 0, and smoothing takes it as the operators do."""
    same = []
    for likelihood in (Likelihood(), Likelihood(label_smoothing=0.1)):
        logits, scores = drawn(2, 150), torch.empty(2, 3, 2)
        logits[:, 3:90] = -float("inf")
        exact, targets = logits.clone(), torch.tensor([1, 149])
        score_in_place(exact, targets, likelihood, None, tuple(scores[0]), slope=True)
        slope = kernel.score_rows(logits, targets, likelihood, None, tuple(scores[1]), slope=torch.float32)
        same.append(torch.allclose(slope, exact, rtol=1e-5, atol=1e-7) and torch.allclose(*scores, rtol=1e-5))
    return all(same)


if __name__ == "__main__":
    tried = kernel.agrees("cpu", torch.bfloat16, weighted=True)
    # Many blocks in few columns, which are quick to interpret.
    kernel.launch = partial(LAUNCH, block=BLOCK)
    whole = whole_losses()
    with scored(by_kernel=True):
        answer = {"single": single_calls(), "outside": outside(), "impossible": impossible()}
    print(json.dumps(answer | {"whole": whole, "tried": tried}))
