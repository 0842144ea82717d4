"""Claim: under fsdp2 on 4 ranks, no rank needs more than half of one process's memory to load a model and take an AdamW step.

A Llama of about 300 million parameters is written from a config (`--toy`: of 3 million). Then one process alone, and after
that four ranks together, load it and take one step; each reports how far its resident memory rose over what its imports had
taken: after loading, and at its peak. The ratio is the single process's peak over the largest rank's.

    python benchmarks/dist_memory.py
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _dist_ranks import joined, run_ranks
from _report import emit, machine, note

SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 14, "vocab_size": 32000}
TOY = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 8000}


def write(folder: str, shape: dict[str, int]) -> int:
    """Write the model, in float32, and return its number of parameters."""
    import torch
    import transformers

    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(parameter.numel() for parameter in model.parameters())


def peak() -> int:
    """Read the peak resident memory, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    """Read the resident memory now, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def rank(path: str, strategy_name: str, columns: int) -> None:
    """Load, take a step of `columns` micro-batches, print the memory that it took."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401  memory of imports, not of the model

    import forge_dist

    with joined() as ranks:
        settings = forge_dist.StrategySettings(strategy=strategy_name)
        strategy = forge_dist.make_strategy(settings, ranks, device=torch.device("cpu"), adapter=False)
        before = max(resident(), peak())
        model = strategy.load(path, dtype=torch.float32)
        loading, loaded = peak() - before, resident() - before
        model, optimizer = strategy.wrap(model, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
        model.train()
        for column in range(columns):
            with strategy.micro_batch(column == columns - 1):
                ids = torch.randint(0, 1000, (1, 64))
                strategy.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        strategy.step(optimizer)
        print(json.dumps({"loading_bytes": loading, "loaded_bytes": loaded, "peak_bytes": peak() - before}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="seconds instead of minutes; the ratio means nothing")
    parser.add_argument("--columns", type=int, default=1, help="micro-batches of the step")
    parser.add_argument("--rank", nargs=2, metavar=("PATH", "STRATEGY"), help="arguments of a rank, set by this script")
    parser.add_argument("--write", metavar="FOLDER", help="only write the model there")
    options = parser.parse_args()
    if options.write:
        print(write(options.write, TOY if options.toy else SHAPE))
        return
    if options.rank:
        rank(*options.rank, options.columns)
        return
    at = machine()
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_apart(folder, toy=options.toy)
        sides: dict[str, list[dict[str, Any]]] = {}
        for name, size in (("single", 1), ("fsdp2", 4)):
            more = ["--columns", str(options.columns)]
            sides[name] = run_ranks(__file__, size, "--rank", folder, name, *more)
            note(f"{name}: {[round(side['peak_bytes'] / 2**20) for side in sides[name]]} MiB at the peak")
    worst = {key: max(side[key] for side in sides["fsdp2"]) for key in sides["fsdp2"][0]}
    emit(
        "dist_memory",
        "a rank of 4 under fsdp2 needs at most half of one process's memory",
        sides["single"][0]["peak_bytes"] / worst["peak_bytes"],
        2.0,
        toy=options.toy,
        at=at,
        single=sides["single"][0],
        fsdp2=sides["fsdp2"],
        sizes={"parameters": parameters, "model_bytes": 4 * parameters, "micro_batches": options.columns, "ranks": 4},
    )


def write_apart(folder: str, *, toy: bool) -> int:
    """Write the model in a process of its own, so that this one stays small."""
    toys = ["--toy"] if toy else []
    return int(subprocess.check_output([sys.executable, __file__, "--write", folder, *toys], text=True).split()[-1])


if __name__ == "__main__":
    sys.exit(main())
