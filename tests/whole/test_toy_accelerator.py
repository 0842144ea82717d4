"""One accelerator from outside, through its entry point alone: chosen, described, trained on, resumed on."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forge
import forge_accel

if TYPE_CHECKING:
    from pathlib import Path

TOY = '''
"""A made-up chip, computed by the CPU: all that a package from outside has to write."""

import torch

from forge_accel import Accelerator, AccelError, Choice, bfloat16, float32


class ToyAccelerator(Accelerator):
    """Two devices that draw random numbers from a generator of their own."""

    name = "toy"
    priority = 50

    def __init__(self, *, index=None, why="asked for by name"):
        super().__init__(why=why)
        self.index = 0 if index is None else index
        self.generator = torch.Generator()

    @classmethod
    def available(cls):
        return Choice(value=True, reason="a toy is always there")

    @classmethod
    def count(cls):
        return 2

    @property
    def device(self):
        return Choice(torch.device("cpu"), f"toy:{self.index}: {self._why}")

    @property
    def machine(self):
        return "Toy 9000, 1 GiB"

    @property
    def collective_backend(self):
        return Choice("gloo", "gloo: toys speak to each other through the CPU")

    @property
    def fused_optimizer(self):
        return Choice(value=True, reason="fused: a toy steps like a CPU")

    @property
    def default_tokens(self):
        return 512

    def dtype(self, requested="auto"):
        names = {"auto": float32, "float32": float32, "bfloat16": bfloat16}
        if requested not in names:
            raise AccelError(f"dtype={requested!r} is unknown to toys")
        return Choice(names[requested], "float32: toys are exact")

    def seed(self, seed):
        super().seed(seed)
        self.generator.manual_seed(seed)

    def rng_state(self):
        return {**super().rng_state(), "toy": self.generator.get_state()}

    def set_rng_state(self, state):
        super().set_rng_state(state)
        self.generator.set_state(state["toy"])

    def synchronize(self):
        pass

    def peak_memory_bytes(self):
        return 2**20

    def reset_peak_memory(self):
        return True

    def peak_flops(self, dtype):
        return 1e9
'''

FEW: dict[str, Any] = {"effective_batch_size": 8, "learning_rate": 1e-2}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with the class and its entry point, as pip does, where Python and its children look."""
    site = tmp_path / "site"
    metadata = site / "toy_chip-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "toy_chip.py").write_text(TOY)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-chip\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[forge.accelerators]\ntoy = toy_chip:ToyAccelerator\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "toy_chip", raising=False)


def steps(run: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.usefixtures("toy")
def test_it_is_known_by_its_entry_point() -> None:
    """By name, by number, by `auto` where it ranks highest, in the errors of others, in the rows of a log."""
    found = forge_accel.accelerator("toy:1")
    assert found.device.reason == "toy:1: asked for by name"
    assert forge_accel.device_count("toy") == 2
    rows = {row.what: row for row in forge_accel.describe(found, forge_accel.DeviceSettings(device="toy"))}
    assert rows["machine"].value == "Toy 9000, 1 GiB"
    assert "512 tokens a micro-batch" in rows["default_tokens"].reason
    with pytest.raises(forge_accel.AccelError, match="known are auto, cpu, cuda, hpu, mps, npu, rocm, toy, xpu"):
        forge_accel.accelerator("toi")
    with pytest.raises(forge_accel.AccelError, match="on toy.*use device=cpu"):
        found.quantization("nf4")
    if not forge_accel.CUDAAccelerator.available().value:
        assert forge_accel.accelerator().name == "toy"
    found.seed(7)
    state, drawn = found.rng_state(), torch.rand(3, generator=found.generator)
    found.set_rng_state(state)
    assert torch.equal(torch.rand(3, generator=found.generator), drawn)
    with pytest.raises(forge_accel.AccelError, match="this RNG state is of cpu, toy, but cpu has generators for cpu"):
        forge_accel.accelerator("cpu").set_rng_state(state)


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_run_trains_on_it(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """`forge.sft(device="toy")` trains, names the device in its log and configuration, and learns what a CPU learns."""
    given = {"model_path": model_dir, "data_path": chats, "max_tokens_per_gpu": 256, "max_steps": 4, **FEW}
    result = forge.sft(**given, ckpt_output_dir=tmp_path / "toy", device="toy")
    forge.sft(**given, ckpt_output_dir=tmp_path / "cpu", device="cpu")
    assert result.steps == 4
    for (loss, norm), (plain_loss, plain_norm) in zip(steps(tmp_path / "toy"), steps(tmp_path / "cpu"), strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-6)
        assert norm == pytest.approx(plain_norm, rel=1e-5)
    log = (tmp_path / "toy" / "log.txt").read_text()
    assert "device: toy:0: asked for by name" in log
    assert "dtype: float32: toys are exact" in log


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_run_takes_its_choices_and_goes_on_with_it(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Its default tokens are the micro-batch's, and another run goes on from a full state, with the same losses."""
    given = {"model_path": model_dir, "data_path": chats, "max_steps": 4, **FEW}
    forge.sft(**given, ckpt_output_dir=tmp_path / "first", device="toy", keep_full_state=True)
    assert "max_tokens_per_gpu: 512" in (tmp_path / "first" / "config.yaml").read_text()
    state = str(tmp_path / "first" / "full_state" / "step_3")
    forge.sft(**given, ckpt_output_dir=tmp_path / "resumed", device="toy", resume=state)
    assert steps(tmp_path / "resumed") == steps(tmp_path / "first")[3:]
