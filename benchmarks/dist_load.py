"""Claim: under fsdp2 a rank loads a model of 3B parameters with at most 1.3 times its share of the weights.

A random model with the shape of Llama 3.2 3B is written in bfloat16 (6.4 GB, in files of 500 MB; `--layers` makes it shallower,
`--toy` small). Then 4 and 8 gloo ranks load it together, each its shards. While they load, each looks at its own resident
memory every 2 milliseconds: `peak_bytes` is the most over what it had before (pages of mapped files that were read included, as
the system counts them), `anonymous_bytes` the most of what no file holds, `loaded_bytes` what is left afterwards. One share is
the model's bytes over the ranks.

    python benchmarks/dist_load.py --directory /path/with/room
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _dist_ranks import joined, run_ranks
from _report import emit, machine, note

SHAPE = {"hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 128256}
HEADS = {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}
LAYERS = 28
TOY = {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 8000}
MOST = 1.3  # shares


def write(folder: str, shape: dict[str, int], layers: int) -> int:
    """Write the model in bfloat16, tensor by tensor, and return its bytes."""
    import torch
    import transformers

    from forge_dist.exporting import _safetensors_writer

    config = transformers.LlamaConfig(num_hidden_layers=layers, tie_word_embeddings=True, **shape, **HEADS)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {name: parameter.to(torch.bfloat16) for name, parameter in model.named_parameters()}
    _safetensors_writer.FILE_SIZE = 500 * 10**6
    numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    with _safetensors_writer.SafetensorsWriter(Path(folder), tensors, parameters=model.num_parameters()) as writer:
        for name, tensor in tensors.items():
            times = -(-tensor.numel() // len(numbers))
            writer.write(name, numbers.repeat(times)[: tensor.numel()].view(tensor.shape))
    return sum(tensor.nbytes for tensor in tensors.values())


def memory() -> tuple[int, int]:
    """Read the resident memory now, all of it and the part that no file holds, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return tuple(int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon"))  # pyrefly: ignore[bad-return]


def rank(path: str, dtype: str) -> None:
    """Load, and print the memory that it took."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401  memory of imports, not of the model
    from transformers.distributed import DistributedConfig  # noqa: F401

    import forge_dist

    with joined() as ranks:
        settings = forge_dist.StrategySettings(strategy="fsdp2")
        strategy = forge_dist.make_strategy(settings, ranks, device=torch.device("cpu"), adapter=False)
        ranks.barrier()
        before = memory()
        peaks, done = [0, 0], threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                for index, value in enumerate(memory()):
                    peaks[index] = max(peaks[index], value)

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        began = time.perf_counter()
        model = strategy.load(path, dtype=getattr(torch, dtype))
        seconds = time.perf_counter() - began
        done.set()
        watching.join()
        after = memory()
        held = sum(parameter.to_local().nbytes for parameter in model.parameters())  # pyrefly: ignore[missing-attribute]
        found = {
            "peak_bytes": max(peaks[0], after[0]) - before[0],
            "anonymous_bytes": max(peaks[1], after[1]) - before[1],
            "loaded_bytes": after[0] - before[0],
            "shards_bytes": held,
            "before_bytes": before[0],
            "seconds": round(seconds, 1),
        }
        ranks.barrier()
        print(json.dumps(found), flush=True)


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the weights in memory")
    parser.add_argument("--directory", help="where the model is written; a temporary directory by default")
    parser.add_argument("--toy", action="store_true", help="a small model on 2 ranks: seconds, and no proof")
    parser.add_argument("--rank", nargs=2, metavar=("PATH", "DTYPE"), help="arguments of a rank, set by this script")
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    at = machine()
    shape, layers, sizes = (TOY, 4, [2]) if options.toy else ({**SHAPE}, options.layers, options.ranks)
    sides: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="forge-dist-load-") as folder:
        written = write(folder, shape, layers)
        size = written * (2 if options.dtype == "float32" else 1)
        for world_size in sizes:
            found = run_ranks(__file__, world_size, "--rank", folder, options.dtype)
            share = size / world_size
            worst = {key: max(each[key] for each in found) for key in found[0]}
            shares = {
                key: round(worst[key] / share, 3) for key in ("peak_bytes", "anonymous_bytes", "loaded_bytes", "shards_bytes")
            }
            sides[str(world_size)] = {"share_bytes": round(share), "worst": worst, "worst_in_shares": shares}
            note(f"{world_size} ranks: {shares}, {worst['seconds']} s")
    emit(
        "dist_load",
        f"a rank under fsdp2 loads a 3B with at most {MOST} times its share of the weights",
        MOST / max(side["worst_in_shares"]["peak_bytes"] for side in sides.values()),
        1.0,
        toy=options.toy,
        at=at,
        sides=sides,
        sizes={"layers": layers, **shape, "file_bytes": written, "dtype": options.dtype, "ranks": sizes},
    )


if __name__ == "__main__":
    sys.exit(main())
