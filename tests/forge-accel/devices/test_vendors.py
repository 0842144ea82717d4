"""XPU, HPU, NPU and MPS on stand-ins for their modules of torch, which have the documented functions and arguments alone."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ...lanes import ci_keeps

CHIPS = Path(__file__).parent / "chips"
PAGE = Path(__file__).parents[3] / "docs" / "accelerators.md"
KINDS = ("xpu", "hpu", "npu", "mps")


@pytest.fixture(scope="module")
def found():
    """What a process of its own prints of all four."""
    done = subprocess.run(
        [sys.executable, str(CHIPS / "describe_all.py")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stand_ins():
    """Load the stand-ins' own module."""
    spec = importlib.util.spec_from_file_location("stand_ins", CHIPS / "stand_ins.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_that_is_missing_says_what_is(found):
    """Without library, driver or chip each is refused by name with what is missing; auto is the CPU."""
    assert found["auto"] == "cpu"
    assert "habana_frameworks is not installed" in found["before"]["hpu"]
    assert "torch_npu is not installed (pip install torch-npu" in found["before"]["npu"]
    assert "sees no Intel GPU" in found["before"]["xpu"]
    assert "built without MPS" in found["before"]["mps"]
    assert "no Gaudi HPU here: no file /dev/accel" in found["no driver"]["hpu"]
    assert "no Ascend NPU here: no file /dev/davinci" in found["no driver"]["npu"]
    assert "sees no Intel GPU" in found["gone"]


def test_a_vendors_library_is_not_imported_to_look(found):
    """Whether there is a chip is told from files; the library is imported when a device is made."""
    assert found["imported by asking"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_what_the_class_decides(found, kind):
    """The table of docs/accelerators.md is what `describe` says of each."""
    rows = {what: (value, reason) for what, value, reason in found[kind]["rows"]}
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{kind}`"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # xccl is what a torch that is built for XPUs has; this one is not.
    backend = "cpu:gloo,xpu:xccl" if kind == "xpu" else rows["collective_backend"][0]
    expected = [f"`{kind}`", rows["dtype"][0], rows["attention"][0], f"`{backend}`", rows["fused_optimizer"][0].lower()]
    assert [cells[0], *cells[2:6]] == expected
    assert cells[-1] == rows["support"][0] == "declared"
    assert "each packed sample by itself" in rows["attention"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_there(found, kind):
    """Memory, random states, indices and what is refused, each as the device has it."""
    seen = found[kind]
    assert seen["states"] == {name: ["torch.uint8", "cpu"] for name in ("cpu", kind)}
    assert seen["bfloat16"] == "torch.bfloat16"
    assert (seen["peak"], seen["reset"]) == ((None, False) if kind == "mps" else (0, True))
    assert seen["count"] == (1 if kind == "mps" else 2)
    assert seen["limit"] > 60 * 2**30
    assert f"{kind}:5" in seen["index"]
    assert (seen["ranks"] is None) == (kind in ("hpu", "npu"))
    assert seen["full"] == [kind == each for each in ("npu", "hpu", "xpu", "mps", "none")]
    assert (seen["reserved"] is None) == (kind in ("hpu", "mps"))
    # Gaudi documents one backend of torch.compile, which is not inductor.
    assert seen["compiling"] == [None, "hpu_backend" if kind == "hpu" else "inductor", None]


@pytest.mark.parametrize("kind", KINDS)
def test_counting_takes_no_device(found, kind):
    """A launcher counts: a chip that it opened would be missing to its ranks, for a Gaudi HPU serves one process."""
    assert set(found[kind]["counting"]) <= {"is_available", "device_count"}


def test_quantization_is_what_bitsandbytes_documents(found):
    """XPU and MPS have every type, Gaudi NF4 and 8 bits, Ascend none; another is refused with what the device has."""
    refused = {
        kind: {name for name, why in found[kind]["quantization"].items() if f"on {kind}" in (why or "")} for kind in KINDS
    }
    assert refused == {"xpu": set(), "mps": set(), "hpu": {"fp4"}, "npu": {"nf4", "fp4", "int8"}}
    assert "on hpu (it documents nf4 and int8 there)" in found["hpu"]["quantization"]["fp4"]


def test_what_a_chip_lacks_is_refused(found):
    """Lazy mode on Gaudi (which all but 0 is), bfloat16 on an old NPU."""
    assert [text[: len("PT_HPU_LAZY_MODE=1: device=hpu computes")] for text in found["lazy"]] == [
        f"PT_HPU_LAZY_MODE={mode}: device=hpu computes" for mode in (1, 2)
    ]
    assert found["old npu"] == ["torch.float32", "dtype=bfloat16: Ascend910B3 does not compute it: use dtype=float32."]


@pytest.mark.parametrize("kind", KINDS)
def test_only_documented_functions_are_called(found, kind):
    """A call of another function, or with other arguments, would have been an error; these were made."""
    documented = stand_ins().DOCUMENTED[kind]
    assert set(found[kind]["calls"]) <= set(documented)
    source = "".join(path.read_text() for path in (CHIPS / "stand_ins.py",))
    assert re.search("docs.habana.ai|hiascend.com", source)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_the_stand_ins_have_the_arguments_of_torchs_own(kind):
    """torch.xpu and torch.mps are there on every machine, so the documented arguments are compared with theirs."""
    for name, arguments in stand_ins().DOCUMENTED[kind].items():
        own = inspect.signature(getattr(getattr(torch, kind), name))
        assert list(own.parameters) == [part.partition("=")[0].strip() for part in arguments.split(",") if part], name


# In its eager mode it is what every test of a made-up Gaudi has (whole/test_made_up_chips.py).
@pytest.mark.parametrize("mode", ci_keeps([""], ["", "0"]))
def test_gaudis_library_that_was_loaded_before(mode):
    """torch, transformers or Accelerate may load it first: in its lazy mode it is refused, for the variable comes too late."""
    script = f"""
import sys
sys.path[:0] = [{str(CHIPS)!r}, {str(CHIPS / "libraries" / "hpu")!r}]
import torch, habana_frameworks.torch, forge_accel
forge_accel.HPUAccelerator.nodes = ({__file__!r},)
try:
    print(forge_accel.accelerator("hpu").name)
except forge_accel.AccelError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PT_HPU_LAZY_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | ({"PT_HPU_LAZY_MODE": mode} if mode else {}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    expected = "hpu\n" if mode else "Gaudi's library was loaded in lazy mode already: device=hpu computes in eager mode"
    assert done.stdout.startswith(expected), done.stderr
