"""Names → accelerators: built-in ones, plug-ins by entry point, and errors for the rest."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch

from forge_accel import AccelError, Choice, CPUAccelerator, accelerator, device_count
from forge_accel.devices._registry import GROUP


class Toy(CPUAccelerator):
    """A third party's accelerator: overrides what differs, takes an index."""

    name = "toy"
    priority = 500
    there = True

    def __init__(self, *, index=None, why="asked for by name"):
        super().__init__(why=why)
        self.index = index

    @classmethod
    def available(cls):
        return Choice(value=cls.there, reason="toys are put away" if not cls.there else "a toy lies here")


@pytest.fixture
def plugins(monkeypatch):
    """Let installed packages declare entry points of the group."""
    module = ModuleType("toy_box")
    module.Toy, module.NotOne = Toy, dict
    monkeypatch.setitem(sys.modules, "toy_box", module)

    def declare(**values):
        found = [EntryPoint(name, value, GROUP) for name, value in values.items()]
        monkeypatch.setattr("forge_accel.devices._registry.entry_points", lambda group: found if group == GROUP else [])

    return declare


def test_the_cpu_by_name():
    """Asked for by name, the reason is the asking."""
    acc = accelerator("cpu")
    assert isinstance(acc, CPUAccelerator)
    assert acc.device == Choice(torch.device("cpu"), "cpu: asked for by name")


def test_a_device_of_torch_stands_for_its_name():
    """Whoever has a torch.device need not write it out; one that is no accelerator is named as others are."""
    assert accelerator(torch.device("cpu")).device.value == torch.device("cpu")
    assert (device_count(torch.device("cpu")), device_count(torch.device("cuda:1"))) == (0, 1)
    for wrong in (torch.device("meta"), None, 3):
        with pytest.raises(AccelError, match=f"device='{wrong}' is unknown"):
            accelerator(wrong)


@pytest.mark.parametrize(
    ("name", "said"), [("gpu", "auto, cpu, cuda"), ("gaudi", "For gaudi use hpu"), ("mlx", "use backend=mlx"), ("", "unknown")]
)
def test_an_unknown_name_names_those_that_exist(name, said):
    """The error lists what is known."""
    with pytest.raises(AccelError, match=said):
        accelerator(name)


@pytest.mark.parametrize("name", ["cpu:", "cpu:one", "cuda:-1", "auto:0"])
def test_an_index_that_is_none_is_refused(name):
    """After the colon comes a number; auto has no devices to count."""
    with pytest.raises(AccelError):
        accelerator(name)


def test_a_plugin_extends_the_registry(plugins):
    """An entry point is all it takes: by name, by index, and by auto where its priority is the highest."""
    plugins(toy="toy_box:Toy")
    assert isinstance(accelerator("toy"), Toy)
    assert accelerator("toy:3").index == 3
    best = accelerator("auto")
    assert isinstance(best, Toy)
    assert best.device.reason == "cpu: a toy lies here"
    with pytest.raises(AccelError, match="auto, cpu, cuda, hpu, mps, npu, rocm, toy, xpu"):
        accelerator("bike")


def test_a_plugin_that_is_not_available(plugins, monkeypatch):
    """By name it is an error, by auto the next one is taken; both say why."""
    plugins(toy="toy_box:Toy")
    monkeypatch.setattr(Toy, "there", False)
    with pytest.raises(AccelError, match="'toy' is not there: toys are put away"):
        accelerator("toy")
    assert "toys are put away" in accelerator("auto").device.reason


@pytest.mark.parametrize("value", ["no_such_box:Toy", "toy_box:Missing", "toy_box:NotOne"])
def test_a_broken_plugin_is_reported(plugins, value):
    """By name it is an error; auto warns and goes on without it."""
    plugins(broken=value)
    with pytest.raises(AccelError, match="broken"):
        accelerator("broken")
    with pytest.warns(RuntimeWarning, match="broken"):
        acc = accelerator("auto")
    assert not isinstance(acc, Toy)


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_a_plugin_cannot_take_a_name_that_is_taken(plugins, name):
    """A package that is merely installed does not replace what a run computes on."""
    plugins(**{name: "toy_box:Toy"})
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert type(accelerator("cpu")) is CPUAccelerator
