"""Claim: forward and backward of a linear layer under OSFT take at most 1.15 times dense where square, 1.3 on MLP shapes.

One linear layer, T rows, a quarter of the directions free: full fine-tuning, LoRA, PEFT's `osf`, mini-trainer's module, and
ours in its three forms (strict/direct, strict/factors, paper), in turn in one process. A step is forward, backward with the
gradient of the input (a layer inside of a model has one), AdamW, and the method's projections around it, timed apart. All
sides begin as the same layer, which is compared first. `ratio` is the limit over the time of strict/direct (the default) as a
share of dense, the worst of the shapes. Beside it: every side's time for forward and backward and for a step, its
projections, trainable weights, and bytes of optimizer state and of the layer.

    python benchmarks/osft_cost.py
"""

import argparse
import contextlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from _report import emit, machine, note

LIMITS = {"square": 1.15, "mlp": 1.3}
SHAPES = ((1024, 1024), (4096, 1024), (1024, 4096))
FORMS = {"direct": ("strict", "direct"), "factors": ("strict", "factors"), "paper": ("paper", "direct")}
LORA_R = 16


class Side:
    """Model of one linear layer, its optimizer, and its method's hooks before and after the optimizer's step."""

    def __init__(self, model: Any, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None) -> None:
        import torch

        self.model, self.before, self.after = model, before, after
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)

    def step(self, x: Any, dy: Any) -> tuple[float, float, float, float]:
        """Time a step: seconds of forward and backward, the same in CPU seconds, seconds of projections, and of all."""
        x.grad = None
        self.optimizer.zero_grad()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self.model(x).backward(dy)
        passed, cpu = time.perf_counter(), time.process_time() - cpu_begin
        if self.before is not None:
            self.before()
        projected = time.perf_counter()
        self.optimizer.step()
        moved = time.perf_counter()
        if self.after is not None:
            self.after()
        end = time.perf_counter()
        around = (projected - passed) * (self.before is not None) + (end - moved) * (self.after is not None)
        return passed - begin, cpu, around, end - begin

    def sizes(self) -> dict[str, int]:
        """Count, after a step, trainable weights, bytes of AdamW's state, bytes of the layer's weights and constants."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return {
            "trainable": sum(p.numel() for p in self.parameters),
            "optimizer_bytes": sum(t.numel() * t.element_size() for t in states),
            "layer_bytes": sum(t.numel() * t.element_size() for t in tensors),
        }


def sides(weight: Any, free: int) -> dict[str, Side]:
    """Make every side over a copy of the layer."""
    import peft
    import torch

    from forge_algos import AdapterSettings, adapt

    N, M = weight.shape

    class One(torch.nn.Module):
        """Model of one layer; mini-trainer passes a configuration."""

        def __init__(self, config: object = None) -> None:
            super().__init__()
            self.config = config
            self.layer = torch.nn.Linear(M, N, bias=False)
            self.layer.weight.data.copy_(weight)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    protected = min(N, M) - free
    model: Any = One()
    lora = peft.LoraConfig(r=LORA_R, lora_alpha=2 * LORA_R, target_modules=["layer"])
    osf = peft.OSFConfig(effective_rank=protected, target_modules=["layer"])
    found = {
        "dense": Side(model),
        "lora": Side(peft.get_peft_model(One(), lora)),  # pyrefly: ignore[bad-argument-type]  any module will do
        "peft_osf": Side(peft.get_peft_model(One(), osf)),  # pyrefly: ignore[bad-argument-type]
    }
    if importlib.util.find_spec("mini_trainer") is not None:
        mini = mini_trainer_model(One, protected)
        found["mini_trainer"] = Side(mini, mini.project_gradients, mini.project_parameters)
    for name, (rule, form) in FORMS.items():
        settings: Any = {
            "osft_rule": rule,
            "osft_form": form,
            "unfreeze_rank_ratio": free / min(N, M),
            "target_modules": ("layer",),
        }
        adaptation = adapt(One(), AdapterSettings(adapter="osft", **settings))
        projects = name != "direct"
        found[name] = Side(
            adaptation.model, adaptation.before_step if projects else None, adaptation.after_step if projects else None
        )
    return found


def mini_trainer_model(base: Any, protected: int) -> Any:
    """Make mini-trainer's model: the layer's weight replaced by its factors."""
    import torch
    from mini_trainer.osft_utils import create_osft_model_class

    made: Any = create_osft_model_class(base)
    # It prints to stdout, where only the benchmark's line may be.
    with contextlib.redirect_stdout(sys.stderr):
        return made(None, osft_config={"layer.weight": protected}, initialize_osft=True, output_dtype=torch.float32)


def require_the_same(found: dict[str, Side], x: Any) -> None:
    """End the benchmark if a side does not begin as the dense layer, or has nothing to train."""
    expected = found["dense"].model(x).detach()
    for name, side in found.items():
        off = float((side.model(x).detach() - expected).norm() / expected.norm())
        if off > 1e-4 or not side.parameters:
            raise SystemExit(f"{name} does not compute the same: {off:.1e} apart, {len(side.parameters)} parameters")


def measure(N: int, M: int, T: int, ratio: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure the medians of each side for one shape, and their ratios to dense."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(N, M, generator=generator) / M**0.5
    x = torch.randn(T, M, generator=generator).requires_grad_()
    dy = torch.randn(T, N, generator=generator)
    found = sides(weight, round(ratio * min(N, M)))
    require_the_same(found, x)
    taken: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name in list(found) if number % 2 == 0 else reversed(list(found)):
            seconds = found[name].step(x, dy)
            # The first round allocates the optimizer's state.
            if number:
                taken[name].append(seconds)
    measured: dict[str, dict[str, Any]] = {}
    for name, times in taken.items():
        parts = zip(("forward_backward", "forward_backward_cpu", "projections", "step"), zip(*times, strict=True), strict=True)
        measured[name] = {part: round(statistics.median(values), 5) for part, values in parts} | found[name].sizes()
    for figures in measured.values():
        for part in ("forward_backward", "forward_backward_cpu", "step"):
            figures[f"{part}_over_dense"] = round(figures[part] / measured["dense"][part], 3)
    return measured


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="T, rows of activations a step")
    parser.add_argument("--ratio", type=float, default=0.25, help="unfreeze_rank_ratio")
    parser.add_argument("--rounds", type=int, default=11, help="measured steps of each side")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (default: its own choice)")
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    options = parser.parse_args()
    shapes = SHAPES
    if options.toy:
        options.rows, options.rounds, shapes = 64, 2, ((64, 64), (128, 64), (64, 128))
    at = machine()

    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    margins, cpu_margins = [], []
    for N, M in shapes:
        measured = cases[f"{N}x{M}"] = measure(N, M, options.rows, options.ratio, options.rounds)
        limit = LIMITS["square" if N == M else "mlp"]
        margins.append(limit / measured["direct"]["forward_backward_over_dense"])
        cpu_margins.append(limit / measured["direct"]["forward_backward_cpu_over_dense"])
        for name, figures in measured.items():
            note(f"{N}x{M} {name}: {figures}")
    beside = {
        other: {shape: round(measured[other]["step"] / measured["direct"]["step"], 3) for shape, measured in cases.items()}
        for other in ("dense", "lora", "peft_osf", "mini_trainer")
        if all(other in measured for measured in cases.values())
    }
    missing = [] if "mini_trainer" in beside else ["mini_trainer"]
    for name in missing:
        note(f"{name} is not installed here: its side is left out")
    emit(
        "osft_cost",
        "the limit (1.15 square, 1.3 MLP) over forward and backward of strict/direct as a share of dense, the worst shape",
        min(margins),
        1.0,
        toy=options.toy,
        at=at,
        cpu_time_ratio=round(min(cpu_margins), 3),
        limits=LIMITS,
        step_over_direct=beside,
        cases=cases,
        missing_sides=missing,
        sizes={
            "rows": options.rows,
            "unfreeze_rank_ratio": options.ratio,
            "lora_r": LORA_R,
            "rounds": options.rounds,
            "threads": torch.get_num_threads(),
        },
    )


if __name__ == "__main__":
    main()
