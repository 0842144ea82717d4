"""Whole runs on devices npu, hpu, xpu and mps that are made up: the vendors' classes of forge_accel, with the CPU's numbers.

tests/forge-accel/devices/chips/chips.cpp gives torch such devices: tensors of their own type and dispatch keys, memory and
kernels of the CPU. A tensor of the CPU that meets one of them is an error, and so is float64 on mps. It takes a C++ compiler,
about ten seconds. torch has one kind of accelerator a process, so runs are in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from .repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CHIPS = ROOT / "tests" / "forge-accel" / "devices" / "chips"
CASES = [
    "npu:sft npu:exchange",
    "npu:sft:lora npu:dpo:lora npu:orpo npu:kto npu:fake",
    "hpu:sft hpu:sft:lora hpu:fake xpu:dpo:lora xpu:osft xpu:fake mps:sft mps:dpo mps:reward",
    "mps:grpo",
    "npu:pretrain npu:distill npu:embed npu:classify npu:sft?optimizer=muon npu:sft?activation_checkpointing=selective",
    "npu:sdft npu:ppo npu:rloo npu:sft:dora npu:dpo:ia3 npu:sft:adapter_prompt",
    # Images, clips and videos; towers and projectors train too.
    "npu:sft:none:gemma3 npu:sft:none:qwen2-audio npu:sft:none:qwen3-vl npu:sft:none:llava-next npu:sft:none:mllama",
    "npu:sft:lora:llava npu:dpo:none:gemma3 npu:kto:none:llava npu:distill:none:llava",
    "mps:sft:none:gemma3 xpu:dpo:lora:qwen3-vl npu:embed:none:gemma3 npu:classify:none:gemma3 npu:reward:none:gemma3",
    "npu:grpo:none:gemma3 npu:grpo:lora:llava npu:sdft:none:gemma3 npu:rloo:none:qwen2-audio",
]
SAMPLE = {"grpo", "rloo", "ppo", "sdft"}
pytestmark = [
    pytest.mark.lane,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the made-up chips are C++, and there is no g++ here"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled chips."""
    from torch.utils.cpp_extension import include_paths, library_paths

    target = tmp_path_factory.mktemp("chips") / "libchips.so"
    subprocess.run(
        [
            *("g++", "-shared", "-fPIC", "-std=c++20", "-O0", "-w", str(CHIPS / "chips.cpp"), "-o", str(target)),
            *(f"-I{folder}" for folder in include_paths()),
            *(f"-L{folder}" for folder in library_paths()),
            *("-ltorch_cpu", "-lc10"),
        ],
        check=True,
        timeout=1200,
    )
    return target


@pytest.mark.parametrize("cases", CASES)
def test_a_run_on_a_chip_is_the_cpus_bit_for_bit(cases: str, library: Path, model_dir: Path, tmp_path: Path) -> None:
    """Every loss, gradient norm and exported weight is the CPU's, and a resumed run's too. A step without data is checked."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.whole.made_up_chips", str(library), str(model_dir), str(tmp_path), *cases.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["case"] for each in found] == cases.split()
    for each in found:
        kind, verb = each["case"].partition("?")[0].split(":")[:2]
        if verb == "fake":
            assert each["peak"] > 4 * 10**9
            assert f"at least two devices, {kind}:0 and cpu" in each["planted"]
            continue
        if verb == "exchange":
            assert each == {"case": each["case"], "refused": True, "device": kind, "values": [0.0, 0.0, 0.0]}
            continue
        assert each["chip"] == each["cpu"], each["case"]
        assert len(each["exports"]) > 3
        assert all(each["exports"].values()), each["exports"]
        assert each["resumed"] == each["chip"][-len(each["resumed"]) :]
        assert all(each["resumed_exports"].values())
        # The model was there: thousands of operations and its memory.
        assert each["operations"] > 3000
        assert each["peak"] > 100_000
        assert f"device: {kind}" in each["log"]
        assert "support: declared" in each["log"]
        assert "could not be compared" not in each["log"]
        # Sampling asks a device for each token anyway.
        assert not each["waits"] or verb in SAMPLE, each["waits"]
