"""Claim: a step of our fsdp2 is as fast as one of bare `fully_shard` with the same groups: at least 0.97 of its speed, 2 ranks.

Both sides hold the same model, divided along the same modules, and take turns step by step in the same processes, each round
in the opposite order of the round before: forward, backward, global norm, clipping, fused AdamW, and the loss is read. The
bare side averages over ranks, as `fully_shard` does by itself; ours sums. The ratio is the median over rounds of the bare
side's seconds over ours.

    python benchmarks/dist_step.py --rounds 40
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _dist_ranks import joined, run_ranks
from _report import emit, machine

SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 4096}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
TOKENS = 256


def write(folder: str, shape: dict[str, int]) -> None:
    """Write the model, in float32."""
    import torch
    import transformers

    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


class Ours:
    """Our side: the calls of `forge_algos.train`."""

    def __init__(self, ranks: Any, path: str) -> None:
        import torch

        import forge_dist

        settings = forge_dist.StrategySettings(strategy="fsdp2")
        self.strategy = forge_dist.make_strategy(settings, ranks, device=torch.device("cpu"), adapter=False)
        self.model, self.optimizer = self.strategy.wrap(self.strategy.load(path, dtype=torch.float32), adamw)
        self.model.train()
        self.parameters = list(self.model.parameters())

    def step(self, ids: Any) -> float:
        self.strategy.zero_grad(self.optimizer)
        with self.strategy.micro_batch(last=True):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            self.strategy.backward(loss / self.strategy.world_size)
        norm = self.strategy.grad_norm(self.parameters).item()
        self.strategy.scale_grads(self.parameters, min(1.0, 1.0 / norm))
        self.strategy.step(self.optimizer)
        return loss.item()


class Bare:
    """The bare side: torch alone."""

    def __init__(self, path: str) -> None:
        import torch
        import transformers
        from torch.distributed.fsdp import fully_shard

        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for layer in (model.model.embed_tokens, *model.model.layers):
            fully_shard(layer)
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
        self.model = fully_shard(model)
        self.optimizer = adamw(model)
        self.model.train()

    def step(self, ids: Any) -> float:
        import torch

        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor().item()
        self.optimizer.step()
        return loss.item()


def rank(path: str, rounds: int) -> None:
    """Take turns and print the seconds of each side's steps, and the last losses."""
    import torch

    with joined() as ranks:
        sides = {"ours": Ours(ranks, path), "bare": Bare(path)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        losses: dict[str, float] = {}
        generator = torch.Generator().manual_seed(ranks.rank)
        for turn in range(rounds + 2):
            ids = torch.randint(0, 500, (1, TOKENS), generator=generator)
            for name in sorted(sides, reverse=bool(turn % 2)):
                ranks.barrier()
                started = time.perf_counter()
                losses[name] = sides[name].step(ids)
                ranks.barrier()
                seconds[name].append(time.perf_counter() - started)
        # The first rounds allocate the optimizers' state and FSDP's buffers.
        print(json.dumps({"losses": losses, **{name: took[2:] for name, took in seconds.items()}}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="seconds; the ratio means nothing")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rank", metavar="PATH", help="argument of a rank, set by this script")
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.rounds)
        return
    at = machine()
    rounds = 3 if options.toy else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        write(folder, TOY if options.toy else SHAPE)
        first, *_ = run_ranks(str(Path(__file__)), 2, "--rank", folder, "--rounds", str(rounds))
    ratios = [bare / ours for bare, ours in zip(first["bare"], first["ours"], strict=True)]
    emit(
        "dist_step",
        "a step of our fsdp2 is as fast as one of bare fully_shard with the same groups",
        statistics.median(ratios),
        0.97,
        toy=options.toy,
        at=at,
        seconds={name: statistics.median(first[name]) for name in ("ours", "bare")},
        losses=first["losses"],
        sizes={"ranks": 2, "rounds": rounds, "tokens_per_rank": TOKENS},
    )


if __name__ == "__main__":
    sys.exit(main())
