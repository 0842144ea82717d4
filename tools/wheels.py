"""The six packages as a user installs them: `hatch run wheels` builds, checks and tries them outside of the checkout.

Each package becomes a source archive, and that a wheel; both must hold the repository's LICENSE, and so must a wheel that is
built from the checkout itself. The wheels are installed in new environments in a temporary folder: all six, where `forge sft`
trains a tiny model; and forge-data's alone, where there is no torch and the command `forge-data` prepares rows.
"""

from __future__ import annotations

import email
import json
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import environments
from environments import run
from repository import ROOT, Package, packages

MODEL = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
words = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(["<|endoftext|>", "<|im_end|>", *alphabet])}, merges=[]))
words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
words.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>")
tokenizer.chat_template = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
tokenizer.save_pretrained(sys.argv[1])
if sys.argv[2] == "model":
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, eos_token_id=1, pad_token_id=0)).save_pretrained(sys.argv[1])
"""


def main() -> int:
    """Build, check, install, run."""
    with tempfile.TemporaryDirectory(prefix="forge-wheels-") as scratch:
        folder = Path(scratch)
        built = {package.folder: build(package, folder / "built") for package in packages().values()}
        try_data(built["forge-data"], folder / "data")
        try_all(list(built.values()), folder / "all")
    return 0


def build(package: Package, out: Path) -> Path:
    """Build a package's source archive, and from that the wheel, into `out`; return the wheel."""
    stem = f"{package.distribution.replace('-', '_')}-{package.version}"
    backend = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    licence = (ROOT / "LICENSE").read_bytes()
    with tempfile.TemporaryDirectory() as aside:
        run(*backend, str(out), str(package.path), quiet=True)
        run(*backend, aside, "--wheel", str(package.path), quiet=True)
        wheels = [next(Path(folder).glob(f"{stem}-*.whl")) for folder in (out, aside)]
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                metadata = email.message_from_bytes(archive.read(f"{stem}.dist-info/METADATA"))
                assert metadata.get_all("License-File") == ["LICENSE"], f"{wheel.name}: {metadata.get_all('License-File')}"
                assert archive.read(f"{stem}.dist-info/licenses/LICENSE") == licence, f"{wheel.name}: another LICENSE"
    with tarfile.open(out / f"{stem}.tar.gz") as archive:
        member = archive.extractfile(f"{stem}/LICENSE")
        assert member is not None
        assert member.read() == licence, f"{stem}.tar.gz: another LICENSE"
    say(f"{wheels[0].name} and its source archive, each with LICENSE")
    return wheels[0]


def try_data(wheel: Path, folder: Path) -> None:
    """Install forge-data's wheel alone; there is no torch, and its command prepares and shows rows."""
    python = environments.make(folder, str(wheel))
    found = environments.installed(python)
    assert "torch" not in found, "forge-data alone brings torch"
    assert {name for name in found if name.startswith("forge")} == {"forge-data"}
    write_inputs(python, folder, "tokenizer")
    command = str(python.with_name("forge-data"))
    run(command, "prepare", "rows.jsonl", "--tokenizer", "model", "--store-dir", "store", "--quiet", folder=folder)
    shown = run(command, "stats", "store", "--json", folder=folder, quiet=True)
    assert json.loads(shown), shown
    say(f"forge-data alone: {len(found)} distributions, no torch; `forge-data prepare` and `stats` ran")


def try_all(wheels: list[Path], folder: Path) -> None:
    """Install the six wheels and train a tiny model with `forge sft`."""
    python = environments.make(folder, *map(str, wheels), f"torch=={environments.pins()['torch']}")
    where = run(str(python), "-c", "import forge; print(forge.__file__)", folder=folder, quiet=True).strip()
    assert Path(where).is_relative_to(folder), f"forge was imported from {where}"
    write_inputs(python, folder, "model")
    settings = "--max-steps 3 --effective-batch-size 4 --learning-rate 0.01 --validation-split 0.25".split()
    inputs = ["--model-path", "model", "--data-path", "rows.jsonl", "--ckpt-output-dir", "run"]
    run(str(python.with_name("forge")), "sft", *inputs, *settings, folder=folder)
    result = json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))
    models = list((folder / "run" / "hf_format").glob("samples_*/model.safetensors"))
    assert models, "no model was exported"
    say(f"six wheels: `forge sft` trained and exported {models[0].parent.name}; {sorted(result)}")


def write_inputs(python: Path, folder: Path, kind: str) -> None:
    """Write twelve conversations, and a tokenizer or a tiny model, with what the new environment has."""
    turns = [(f"what is {n} and {n}?", f"it is {2 * n}.") for n in range(12)]
    rows = [{"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]} for ask, answer in turns]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run(str(python), "-c", MODEL, "model", kind, folder=folder)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
