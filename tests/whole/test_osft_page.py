"""`forge osft inspect`: its summary of a run, and its page in a real browser."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from base64 import b64encode
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import forge_algos
from forge._errors import SettingsError
from forge.cli._app import main
from forge.reports.osft._inspect import inspect
from forge_dist import model_identity

if TYPE_CHECKING:
    from pathlib import Path

LEAKING = "model.layers.1.mlp.up_proj"


def make_run(root: Path, model_dir: Path) -> Path:
    """A run directory as an OSFT run leaves it: random moves within the free directions, exported in float32."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    settings = forge_algos.AdapterSettings(adapter="osft", unfreeze_rank_ratio=0.5)
    adaptation: Any = forge_algos.adapt(model, settings, cache=root / "osft")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(1e-3 * torch.randn(parameter.shape, generator=generator))
    plain = {
        name: adaptation.plain(name, tensor).detach() for name, tensor in model.state_dict().items() if ".osft." not in name
    }
    export = root / "hf_format" / "samples_8"
    shutil.copytree(model_dir, export)
    save_file(
        {name: plain[name].contiguous() for name in load_file(model_dir / "model.safetensors")}, export / "model.safetensors"
    )
    (root / "osft" / "plan.json").write_text(json.dumps(adaptation.plan))
    (root / "config.yaml").write_text(f"model_path: {model_dir}\nosft_rule: strict\nosft_svd: exact\nosft_cache: null\n")
    (root / "run.json").write_text(json.dumps({"run": "a", "verb": "osft", "model": model_identity(str(model_dir))}))
    return root


def change_export(run: Path, name: str, by: float) -> None:
    """Move a tensor of the last export somewhere else."""
    file = run / "hf_format" / "samples_8" / "model.safetensors"
    tensors = load_file(file)
    tensors[name] += by * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors, file)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A run without leaks; read-only."""
    return make_run(tmp_path_factory.mktemp("osft") / "kept", model_dir)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "a<b>run")


def test_a_run_that_kept_to_its_rule_leaks_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what was protected, what moved most, the worst leak, and the path of the page."""
    assert main(["osft", "inspect", str(run)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^protected +\d+ of \d+ directions of 14 targets \(osft_rule=strict\)$", said, re.MULTILINE)
    assert "so nothing leaked" in said
    with safe_open(run / "hf_format" / "samples_8" / "model.safetensors", framework="pt") as tensors:
        assert f"0 of {len(list(tensors.keys())) - 14} other tensors changed" in said
    assert said.strip().endswith(str(run / "osft" / "inspect.html"))
    text = (run / "osft" / "inspect.html").read_text(encoding="utf-8")
    assert "▲" not in text.replace("; ▲ marks", "")
    assert "none changed, bit for bit" in text


def test_a_leak_and_a_change_elsewhere_are_named(run: Path) -> None:
    """A target that moved in protected directions is marked, and so is a norm that changed."""
    change_export(run, f"{LEAKING}.weight", 1e-4)
    change_export(run, "model.norm.weight", 1e-3)
    said = inspect(run)
    (leak,) = [line for line in said.splitlines() if line.startswith("worst leak")]
    assert LEAKING in leak
    assert "1 of 14 above it" in leak
    assert "elsewhere   1 of" in said
    text = (run / "osft" / "inspect.html").read_text(encoding="utf-8")
    (row,) = [row for row in re.findall("<tr.*?</tr>", text) if "▲" in row]
    assert LEAKING in row.replace("<wbr>", "")
    assert "model.norm.weight" in text.replace("<wbr>", "")


def test_the_page_is_one_file_that_asks_for_nothing(run: Path) -> None:
    """No address, a policy for its own style and script alone; the drawing is well-formed, names are escaped."""
    file = run.parent / "elsewhere" / "page.html"
    said = inspect(run, layer="0.mlp.down_proj", html=file)
    assert said.splitlines()[-1] == f"page        {file}"
    text = file.read_text(encoding="utf-8")
    assert "script-src 'sha256-" in text
    assert not re.search(
        r"https?://(?!github\.com/leeoniya/uPlot )|<script src|<link (?!rel=\"icon\" href=\"data:,\")",
        text.replace("http://www.w3.org/2000/svg", ""),
    )
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert f"style-src 'sha256-{b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in text
    assert "a&lt;b&gt;run" in text
    assert "a<b>" not in text
    drawings = [ET.fromstring(found) for found in re.findall(r"<svg viewBox=.*?</svg>", text, re.DOTALL)]
    assert len(drawings) == 1
    assert text.replace("<wbr>", "").count("model.layers.0.mlp.down_proj (drawn above)") == 1


def test_bad_input_is_refused_by_name(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another directory, a layer that is none, a base model that changed: exit status 2 and what to do."""
    assert main(["osft", "inspect", str(tmp_path)]) == 2
    assert "no osft/plan.json" in capsys.readouterr().err
    assert main(["osft", "inspect", str(run), "--layer", "up_prj"]) == 2
    assert "--layer up_prj: is no target of this run. Did you mean up_proj?" in capsys.readouterr().err
    base = shutil.copytree(run / "hf_format" / "samples_8", tmp_path / "base")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub("model_path: .*", f"model_path: {base}", config))
    with pytest.raises(SettingsError, match="not the one that the run began with"):
        inspect(run)


def test_lost_singular_vectors_are_made_anew(run: Path) -> None:
    """Without the files in osft/ the summary is the same: they follow from the base model."""
    before = inspect(run)
    for file in (run / "osft").glob("*.safetensors"):
        file.unlink()
    assert inspect(run).splitlines()[:2] == before.splitlines()[:2]


@pytest.mark.slow
def test_it_fits_a_telephone_and_a_desk(run: Path, browser: Any) -> None:
    """At 360 and 1440 pixels, light and dark, nothing overflows, drawings are readable, the console is empty."""
    inspect(run)
    for width, dark in ((360, False), (1440, True)):
        browser.open(run / "osft" / "inspect.html", width=width, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") <= width
        tall = browser.run(
            "Math.min(...[...document.querySelectorAll('figure > svg text')].map(t => t.getBoundingClientRect().height))"
        )
        assert tall >= 9
        inside = "[...document.querySelectorAll('figure')].every(f => [...f.querySelectorAll(':scope > svg text')].every(t => {"
        inside += " const a = t.getBoundingClientRect(), b = f.getBoundingClientRect();"
        inside += " return a.left >= b.left && a.right <= b.right; }))"
        assert browser.run(inside)
        shades = "new Set([...document.querySelectorAll('figure > svg rect')].map(r => getComputedStyle(r).fill)).size"
        assert browser.run(shades) > 8
    assert (browser.errors, browser.requests) == ([], [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", None),
        ("config.yaml", ""),
        ("config.yaml", "a: ["),
        ("config.yaml", "model_path: x\n"),
        ("run.json", "[]"),
        ("osft/plan.json", "[1]"),
        ("osft/plan.json", '{"a": 3}'),
        ("osft/plan.json", '{"a": {"shape": [2, 2], "free": 1}}'),
        ("hf_format/samples_8/model.safetensors", "torn"),
    ],
)
def test_a_damaged_run_is_named_by_its_file(
    run: Path, name: str, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message that names the file, status 2, no page."""
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    assert main(["osft", "inspect", str(run)]) == 2
    assert str(run / name) in capsys.readouterr().err
    assert not (run / "osft" / "inspect.html").exists()
