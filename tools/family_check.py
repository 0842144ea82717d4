"""One model family → what forge makes of a tiny random model of it, as JSON.

`python tools/family_check.py TYPE` prints it. `tools/families.py` runs each family in a process of its own, forked from one
that has imported this module.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

# Also what is imported at its first use otherwise: families are forks of a process that has all of it.
import peft  # noqa: F401 - as said
import torch
import transformers
from family_configs import tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import forge
import forge.run._run
import forge.verbs._sft
import forge_accel
import forge_algos
import forge_dist
import forge_packing

LENGTHS = (17, 9, 2, 23, 40, 13, 5, 61)
"""Tokens of the documents of the one step: shorter and longer than windows, chunks and convolutions."""
TOKENS = 260
"""Tokens of the tokenizer: three special ones, the bytes and a pair; the models have room for more."""
MAX_TOKENS = 64
DEVICE = "cpu"
"""The accelerator that trains; a benchmark of a GPU sets another. The reference is computed on a CPU where that can be."""
CLOSE = {"loss": 1e-5, "gradients": 1e-4, "resumed": 1e-6, "ranks": 1e-5, "rounded": 5e-5}
"""Largest relative differences: of gradients to the norm of all, of figures of two runs to the figure.

`rounded`: of runs whose layers add up in another order, of the types in `ROUNDED`.
"""
ROUNDED = {"gemma4", "gemma4_text"}
"""Types whose gradients rounding to float32 alone moves by 3e-5 on one rank; in float64 they are equal to 3e-8 on two."""
STEPS = {
    "max_steps": 2,
    "effective_batch_size": len(LENGTHS),
    "max_tokens_per_gpu": MAX_TOKENS,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": "lora", "lora_r": 4},
    "osft": {"adapter": "osft", "unfreeze_rank_ratio": 0.5},
}

INSIDE: dict[str, dict[str, int]] = {
    "tp_size=2": {"tp_size": 2},
    "ep_size=2": {"ep_size": 2},
    "tp_size=2, ep_size=2": {"tp_size": 2, "ep_size": 2},
}
"""Ways to divide layers over two ranks."""

Answer = dict[str, Any]
"""`ok` (None: it cannot be asked), `says` (a few words), and what a table shows (`cell`), figures or a `reason`."""


class Document(NamedTuple):
    """Token ids and labels, both int[S]."""

    input_ids: list[int]
    labels: list[int]


def documents() -> list[Document]:
    """Make the documents; no token comes twice in one, so that no two keys of a layer are equal."""
    made = []
    for number, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(number)
        ids = (3 + torch.randperm(TOKENS - 3, generator=generator)[:length]).tolist()
        unlearned = length // 2 if number % 3 == 1 else 0
        made.append(Document(ids, [-100] * unlearned + ids[unlearned:]))
    return made


def save(model_type: str, folder: Path) -> nn.Module:
    """Save a random model of the type, with a tokenizer, as a plain directory; return it."""
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms' weights all begin alike; shaken, a gradient that mixes two of them up shows
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    signs = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    tokenizer = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(signs)}, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(zip(("pad_token", "bos_token", "eos_token"), signs, strict=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    return model


# --- loss and gradients ---------------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """Loss in nats a learned token, and gradients by parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]


def reference(folder: Path) -> Figures:
    """Compute a step with plain transformers on a CPU, or on the accelerator where the model's kernels run on no CPU."""
    try:
        return plain_step(folder, torch.device("cpu"))
    except ValueError:
        # Triton refuses tensors of a CPU by this: layers of flash-linear-attention have no other kernels once it is installed.
        if DEVICE == "cpu":
            raise
    return plain_step(folder, forge_accel.accelerator(DEVICE).device.value)


def plain_step(folder: Path, device: torch.device) -> Figures:
    """Compute a step with plain transformers: one unpadded document at a time, no mask, no cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    with contextlib.suppress(ValueError):
        model.set_attn_implementation("eager")
    with torch.device("meta"):
        made = type(model)(model.config)
    for name, weight in made.named_parameters():
        # What the architecture freezes (Marian's sinusoids) does not learn, though transformers reads it as if it did.
        model.get_parameter(name).requires_grad_(weight.requires_grad)
    model.train()
    total, count = 0.0, 0
    for ids, labels in documents():
        logits = model(torch.tensor([ids], device=device), use_cache=False, return_dict=True).logits[0, :-1]
        targets = torch.tensor(labels[1:], device=device)
        loss = nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
        loss.backward()
        total, count = total + loss.item(), count + int((targets != -100).sum())
    return Figures(total / count, {name: grad / count for name, grad in gradients_of(model).items()})


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all gradients, zeros where there is none."""
    return {
        name: torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.to("cpu", copy=True)
        for name, p in model.named_parameters()
    }


class Recorder(torch.optim.SGD):
    """An optimizer that updates nothing and records the gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: dict[str, torch.Tensor] = {}
        super().__init__(model.parameters(), lr=0.0)

    def step(self, closure: Any = None) -> Any:
        """Record."""
        del closure
        self.seen = gradients_of(self.model)


class Loaded(NamedTuple):
    """A model as forge would train it."""

    model: Any
    packed: bool
    attention: str
    why: str


def load(folder: Path) -> Loaded:
    """Load the model in the first way that fits, as `forge.run` does.

    Raises:
        Exception: forge's, if no way fits.
    """
    machine = forge_accel.accelerator(DEVICE)
    device = machine.device.value
    dtype = machine.dtype("float32").value
    refusals: list[Exception] = []
    for name, packing in (("auto", "on"), ("eager", "on"), ("sdpa", "off"), ("eager", "off")):
        attention = machine.attention(name, dtype).value
        try:
            model = forge_dist.load_model(
                str(folder), dtype=dtype, device=device, attention=attention.name, attention_function=attention.function
            )
            packed, why = forge_algos.keep_documents_apart(
                model, device=device, packing="on" if packing == "on" else "off", longest=max(LENGTHS)
            )
            forge_algos.SFT().bind(model, device=device)
        except (forge_dist.ForgeDistError, forge_algos.ForgeAlgosError) as error:
            refusals.append(error)
            continue
        first = "" if packed or not refusals else f"{str(refusals[0]).partition('. ')[0]}; "
        return Loaded(model, packed, attention.name, first + why)
    leaks = [error for error in refusals if isinstance(error, forge_algos.PackedBatchError)]
    raise (leaks or refusals)[-1]


def step(model: Any) -> Figures:
    """Compute a step with forge's loop, in rows of several documents."""
    rows = documents()
    (micro_batches,) = forge_packing.divide(list(LENGTHS), max_tokens=MAX_TOKENS)
    batches = [forge_packing.collate([rows[number] for number in numbers]) for numbers in micro_batches]
    recorder = Recorder(model)
    (output,) = forge_algos.train(
        model,
        [batches],
        objective=forge_algos.SFT(),
        optimizer=recorder,
        scheduler=torch.optim.lr_scheduler.LambdaLR(recorder, lambda _: 1.0),
        max_grad_norm=0.0,
        device=forge_accel.accelerator(DEVICE).device.value,
        autocast=contextlib.nullcontext,
        # The reference has the plain loss.
        moe_aux_loss="off",
    )
    return Figures(output.loss, recorder.seen)


def compare(found: Figures, expected: Figures) -> Answer:
    """Compare two steps: losses, and each parameter's gradients relative to the norm of all."""
    if found.gradients.keys() != expected.gradients.keys():
        return {"ok": False, "says": f"parameters differ: {sorted(found.gradients.keys() ^ expected.gradients.keys())[:3]}"}
    loss = abs(found.loss - expected.loss) / abs(expected.loss)
    norm = sum(float(grad.double().square().sum()) for grad in expected.gradients.values()) ** 0.5
    errors = {name: float((found.gradients[name] - grad).double().norm()) / norm for name, grad in expected.gradients.items()}
    worst = max(errors, key=lambda name: errors[name])
    ok = loss <= CLOSE["loss"] and errors[worst] <= CLOSE["gradients"]
    says = f"loss {loss:.0e}, gradients {errors[worst]:.0e}" + ("" if ok else f" ({worst})")
    return {"ok": ok, "says": says, "loss": loss, "gradients": errors[worst]}


@contextlib.contextmanager
def constant_draws() -> Iterator[None]:
    """Replace random numbers that a model draws while it trains (PhiMoE's routing) by constants."""
    names: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "exponential_", lambda tensor, *_args, **_kwargs: tensor.fill_(1.0)),
        (torch, "rand_like", lambda tensor, **_: torch.full_like(tensor, 0.5)),
    ]
    before = [getattr(owner, name) for owner, name, _ in names]
    for owner, name, constant in names:
        setattr(owner, name, constant)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(names, before, strict=True):
            setattr(owner, name, original)


# --- whole runs -----------------------------------------------------------------------------------------------------------


def run(folder: Path, where: Path, **settings: Any) -> list[float]:
    """Run `forge.sft` on the documents; return the losses of its steps."""
    data = folder.parent / "rows.jsonl"
    if not data.is_file():
        data.write_text("".join(json.dumps(document._asdict()) + "\n" for document in documents()), encoding="utf-8")
    with constant_draws():
        settings = {"device": DEVICE, "dtype": "float32", **STEPS, **settings}
        forge.sft(model_path=str(folder), data_path=str(data), ckpt_output_dir=str(where), **settings)
    return losses(where)


def losses(where: Path) -> list[float]:
    """Return the losses in metrics.jsonl."""
    lines = map(json.loads, (where / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def equal(found: Sequence[float], expected: Sequence[float], close: float) -> Answer:
    """Compare the losses of two runs."""
    error = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    return {"ok": error <= close, "says": f"{error:.0e}"}


def resumed(folder: Path, whole: Sequence[float]) -> Answer:
    """Stop a run after its first step, start it again, and compare."""
    where = folder.parent / "resumed"
    run(folder, where, max_steps=1, full_state_every_steps=1, keep_full_state=True)
    return equal(run(folder, where, full_state_every_steps=1), whole, CLOSE["resumed"])


def adapted(folder: Path, adapter: str) -> Answer:
    """Train an adapter of the default targets, and say how many there are."""
    where = folder.parent / adapter
    found = run(folder, where, **ADAPTERS[adapter])
    log = (where / "log.txt").read_text(encoding="utf-8")
    said = re.search(r"(\d+) (?:linear layers|targets)[^\n]*", log)
    if said is None or not all(map(math.isfinite, found)):
        return {"ok": False, "says": f"losses {found}" if said else "no targets"}
    return {"ok": True, "says": said[0], "cell": said[1]}


def rank(number: int, port: int, name: str, settings: dict[str, Any], folder: Path, where: Path) -> None:
    """Run one of two ranks; its error goes to a file of this name."""
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        run(folder, where, **settings)
    except Exception as error:
        refused = "refused" if isinstance(error, forge_dist.StrategyError) else "failed"
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        (where.parent / f"{name} {refused}.txt").write_text(said, encoding="utf-8")
        raise


def two_ranks(folder: Path, whole: Sequence[float]) -> Answer:
    """Divide the model over two ranks by fsdp2, or repeat it by ddp where it cannot be divided, and compare."""
    home = folder.parent
    for strategy in ("fsdp2", "ddp"):
        ended = on_two_ranks(folder, strategy, {"strategy": strategy})
        if not any(ended):
            found = equal(losses(home / strategy), whole, CLOSE["ranks"])
            return found if strategy == "fsdp2" else {**found, "cell": strategy, "reason": _said(home)}
        if list(home.glob("* failed.txt")):
            break
    return {"ok": False, "says": _said(home) or f"exit statuses {ended}"}


def on_two_ranks(folder: Path, name: str, settings: dict[str, Any]) -> list[int | None]:
    """Run two ranks in a directory of this name; return their exit statuses."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    where = folder.parent / name
    processes = [context.Process(target=rank, args=(n, store.port, name, settings, folder, where)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def inside_layers(folder: Path, whole: Sequence[float], name: str, *, close: float) -> Answer:
    """Divide the layers themselves over two ranks, and compare; a refusal by name is an answer too."""
    ended = on_two_ranks(folder, name, {"strategy": "fsdp2", **INSIDE[name]})
    if not any(ended):
        return equal(losses(folder.parent / name), whole, close)
    said = _said(folder.parent, name)
    refused = not list(folder.parent.glob(f"{name} failed.txt"))
    return {"ok": None if said and refused else False, "says": said or f"exit statuses {ended}"}


def _said(home: Path, name: str = "*") -> str:
    """Return the first error of a rank."""
    return next((file.read_text(encoding="utf-8") for file in sorted(home.glob(f"{name} *ed.txt"), key=os.path.getmtime)), "")


def gguf(folder: Path) -> Answer:
    """Write the run's model as GGUF, which is read back and compared."""
    try:
        forge.export(folder.parent / "whole", folder.parent / "gguf", format="gguf", dtype="float32")
    except forge_dist.ModelError as error:
        return {"ok": None, "says": str(error).rpartition(": ")[2]}
    return {"ok": True, "says": "read back"}


# --- one family -----------------------------------------------------------------------------------------------------------


def asked(check: Callable[[], Answer]) -> Answer:
    """Return a check's answer; an error of forge's own is a refusal, any other a failure."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this check's answer
        refused = isinstance(getattr(error, "exit_status", None), int)
        where = "" if refused else f"{type(error).__name__}: "
        return {"ok": False, "refused": refused, "says": where + " ".join(str(error).split())[:600]}


def numbers(folder: Path) -> Answer:
    """Compare a step with that of plain transformers."""
    with constant_draws():
        try:
            expected = reference(folder)
        except Exception as error:  # noqa: BLE001 - as above
            return {"ok": None, "says": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        loaded = load(folder)
        answer = compare(step(loaded.model), expected)
    return {**answer, "packed": loaded.packed, "attention": loaded.attention, "why": loaded.why}


CHECKS = ("built", "numbers", "export", "resumed", "ranks", "lora", "osft", "gguf")


def check(model_type: str, home: Path, only: Sequence[str] = CHECKS) -> dict[str, Answer]:
    """Ask everything about one family; `home` is an empty folder."""
    folder = home / "model"
    found: dict[str, Answer] = {}

    def ask(name: str, question: Callable[[], Answer]) -> bool:
        if name in only:
            found[name] = asked(question)
        return name not in only or found[name]["ok"] is True

    def built() -> Answer:
        model = save(model_type, folder)
        return {"ok": True, "says": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}

    if not (ask("built", built) and ask("numbers", partial(numbers, folder))):
        return found
    whole: list[float] = []

    def export() -> Answer:
        whole.extend(run(folder, home / "whole"))
        return {"ok": True, "says": "read back"}

    if ask("export", export):
        # Before anything else makes threads: the ranks are forks.
        ask("ranks", lambda: two_ranks(folder, whole))
        for name in INSIDE:
            close = CLOSE["rounded" if model_type in ROUNDED else "ranks"]
            ask(name, partial(inside_layers, folder, whole, name, close=close))
        ask("resumed", lambda: resumed(folder, whole))
        ask("gguf", lambda: gguf(folder))
    for adapter in ADAPTERS:
        ask(adapter, partial(adapted, folder, adapter))
    return found


def answers(model_type: str, only: Sequence[str] = CHECKS) -> dict[str, Answer]:
    """Check a family in a folder that goes afterwards."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as home:
        return check(model_type, Path(home), only)


def main(arguments: Sequence[str]) -> None:
    """Print the answers of one family."""
    print(json.dumps(answers(arguments[0]), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
