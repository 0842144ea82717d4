"""Claim: a model that learns with its weights rounded to 4 bits loses less in a 4-bit file than one that is rounded afterwards.

A small llama of bytes learns Python's manual in float32. From there it learns the source of Python's standard library on the
same rows, without `qat` and with it, and is measured on source that it has not seen: with its own weights, and with those that
a GGUF file has in their place. `lost` is what rounding costs over the unrounded model of the plain run, in nats a token;
`ratio` is what the plain run loses in a q4_0 file over what the run with `qat` loses. tests/whole/test_qat.py proves that the
numbers measured are those of the file. With `--model DIRECTORY` that model learns the second text, by its own tokens; with
`--adapter lora` both runs train an adapter, which a file has merged.

    python benchmarks/qat.py
    python benchmarks/qat.py --model SmolLM2-135M-Instruct --steps 16 --length 32 --rate 5e-5 --kinds q4_0
    python benchmarks/qat.py --adapter lora --rate 2e-3
"""

import argparse
import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from _report import emit, machine, note
from weights_drift import DOCUMENTS, model_of, rows, texts

TARGET = 1.0
KINDS = ("q4_0", "q8_0")


def learn(model: Any, data: list[Any], rate: float, kind: str | None, adapter: str = "none") -> Any:
    """Train a model, its weights rounded to a kind or as they are; return it with its adapter."""
    import torch

    import forge_algos
    import forge_dist

    torch.manual_seed(0)
    model = forge_algos.adapt(model, forge_algos.AdapterSettings(adapter=adapter)).model
    settings = forge_algos.OptimizerSettings(learning_rate=rate)
    optimizer = forge_algos.make_optimizer(model, settings)
    quantized = None if kind is None else forge_algos.QuantizedWeights(model, forge_dist.rounded_weights(model, kind))
    schedule = forge_algos.schedule(optimizer, settings, num_steps=len(data))
    given: dict[str, Any] = {"objective": forge_algos.SFT(), "optimizer": optimizer, "scheduler": schedule}
    for _ in forge_algos.train(model, data, **given, quantized=quantized):
        pass
    return model


def measured(model: Any, data: list[Any], kind: str | None) -> float:
    """Return the loss of a model on rows, in nats a token, as a GGUF file of a kind holds it or as it is."""
    import forge_algos
    import forge_dist

    rounding = nullcontext()
    if kind is not None:
        rounding = forge_algos.QuantizedWeights(model, forge_dist.rounded_weights(model, kind)).in_place()
    with rounding:
        return forge_algos.evaluate(model, [row for step in data for row in step], objective=forge_algos.SFT()).loss


def start_of(options: argparse.Namespace, length: int, steps: int) -> tuple[Any, np.ndarray]:
    """Return the model that begins, and the text that it learns, as tokens."""
    manual, source = texts()
    if options.model is None:
        model = model_of(64 if options.toy else 256)
        learn(model, rows(manual, 1, steps, length), 1e-3, None)
        return model, source
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(options.model)(source.tobytes().decode(), verbose=False)["input_ids"]
    return AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"), np.array(tokens)


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    parser.add_argument("--rate", type=float, default=3e-4, help="highest learning rate of the second text")
    parser.add_argument("--adapter", choices=("none", "lora", "rslora", "dora"), default="none", help="what is trained of it")
    parser.add_argument("--model", help="directory of a model, in the place of a small one of bytes")
    parser.add_argument("--steps", type=int, help="steps on each text")
    parser.add_argument("--length", type=int, default=64, help="tokens of a document, of which a step has eight")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="types of the file, q4_0 first")
    options = parser.parse_args()
    length, at = 16 if options.toy else options.length, machine()
    steps = options.steps or (12 if options.toy else 400)
    start, text = start_of(options, length, steps)
    cut = len(text) * 9 // 10
    data, unseen = rows(text[:cut], 2, steps, length), rows(text[cut:], 3, max(2, steps // 10), length)
    before, plain = measured(start, unseen, None), learn(copy.deepcopy(start), data, options.rate, None, options.adapter)
    exact, found = measured(plain, unseen, None), {}
    note(f"before {before:.4f}, after {exact:.4f} nats a token")
    for kind in options.kinds:
        trained = learn(copy.deepcopy(start), data, options.rate, kind, options.adapter)
        losses = {"rounded afterwards": measured(plain, unseen, kind), "qat": measured(trained, unseen, kind)}
        found[kind] = {name: {"loss": round(loss, 5), "lost": round(loss - exact, 5)} for name, loss in losses.items()}
        found[kind]["qat unrounded"] = {"loss": round(measured(trained, unseen, None), 5)}
        found[kind]["rounded before"] = {"loss": round(measured(start, unseen, kind), 5)}
        note(f"{kind}: {found[kind]}")
    first = options.kinds[0]
    lost = {name: found[first][name]["lost"] for name in ("rounded afterwards", "qat")}
    claim = f"what rounding to {first} costs on held-out text without quantization-aware training, over what it costs with it"
    weights = sum(p.numel() for p in start.parameters())
    sizes = {
        "adapter": options.adapter,
        "model": Path(options.model).name if options.model else "bytes",
        "steps": steps,
        "tokens": DOCUMENTS * length,
        "weights": weights,
    }
    # Trained with the rounding a model may end below the plain one's loss: then nothing is lost.
    ratio, exact = lost["rounded afterwards"] / max(lost["qat"], 1e-5), {"before": round(before, 5), "after": round(exact, 5)}
    emit("qat", claim, ratio, TARGET, toy=options.toy, at=at, sizes=sizes, rate=options.rate, unrounded=exact, kinds=found)


if __name__ == "__main__":
    main()
