"""hatch.toml: what it installs is what the packages declare, pinned and no more."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from .repository import LEAVES, PACKAGES, ROOT

ENVIRONMENTS: dict[str, Any] = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
ALONE = ENVIRONMENTS["hatch-test"]
RUNNERS = {"pytest", "pytest_xdist", "hypothesis"}
"""What runs tests and imports nothing that a leaf could lean on."""
IN_THE_MAIN_ENVIRONMENT = {"accelerate", "av", "deepspeed", "PIL", "soundfile", "soxr"}
"""Its tests take minutes, or need torch in models' processors, and are run once."""
IN_A_LANE = {"eval", "instructlab", "liger", "mini-trainer", "mlx", "trackio"}
"""Hundreds of megabytes, or kernels to be built, which a lane's environment has."""
KERNELS = {"liger_kernel"}
"""Needs Triton, which the environment `liger` has."""


def inherited(name: str, option: str) -> Any:
    """An option of an environment, or of the templates that it follows; None where none has it."""
    table = ENVIRONMENTS[name]
    template = table.get("template")
    return table.get(option) or (inherited(template, option) if template not in {None, name} else None)


def installed(leaf: str) -> list[str]:
    """What hatch installs beside a leaf to test it alone."""
    chosen = ALONE["overrides"]["matrix"]["package"]["extra-dependencies"]
    return ALONE["dependencies"] + [entry["value"] for entry in chosen if leaf in entry["if"]]


def members(name: str) -> dict[str, set[str]]:
    """Folder of each package that an environment installs → the extras that come along."""
    tables = [entry if isinstance(entry, dict) else {"path": entry} for entry in ENVIRONMENTS[name]["workspace"]["members"]]
    return {table["path"].removeprefix("packages/"): set(table.get("features", [])) for table in tables}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_installs_with_pip(name: str) -> None:
    """uv does not read pip's configuration, and hatch's own environments default to it: each one that we name says pip."""
    assert inherited(name, "installer") == "pip"
    # hatch's own default for these comes before a template's.
    if name.startswith("hatch-"):
        assert ENVIRONMENTS[name]["installer"] == "pip"


def test_the_environments_of_hatch_itself_are_ours() -> None:
    """Tests, lint, format and types run with what this file pins, not with what hatch would choose."""
    assert {"hatch-test", "hatch-check-code", "hatch-check-fmt", "hatch-check-types"} <= set(ENVIRONMENTS)


def test_every_leaf_is_tested_alone() -> None:
    """The matrix of `hatch test` is the five leaves, one member an environment."""
    assert ALONE["matrix"] == [{"package": list(LEAVES)}]
    assert ALONE["workspace"]["members"] == ["packages/{matrix:package}"]
    assert ALONE["default-args"] == ["tests/{matrix:package}"]


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_alone_has_what_it_declares_and_no_more(leaf: str) -> None:
    """Beside what runs tests: torch, pinned, where the leaf declares it, and what its extras bring that is tested there."""
    names = {re.split(r"[<>=]", line)[0].replace("-", "_") for line in installed(leaf)}
    extras = PACKAGES[leaf].optional - IN_THE_MAIN_ENVIRONMENT - KERNELS
    assert names == RUNNERS | ({"torch"} & PACKAGES[leaf].required) | extras


@pytest.mark.parametrize("leaf", LEAVES)
def test_what_a_leaf_alone_skips_is_run_in_the_main_environment(leaf: str) -> None:
    """A test that needs what a leaf's own environment lacks is marked `together`, or no environment would run it."""
    # accelerate comes with PEFT, which is there.
    lacking = IN_THE_MAIN_ENVIRONMENT - {"accelerate"} | ({"torch"} - PACKAGES[leaf].required)
    lacks = [f'importorskip("{name}' for name in lacking]
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / leaf).rglob("test_*.py")}
    skipping = [path for path, text in texts.items() if any(each in text for each in lacks) and "mark.together" not in text]
    assert [path.relative_to(ROOT).as_posix() for path in skipping] == []


def test_the_environment_of_everything_has_every_package_with_every_extra() -> None:
    """What is not tested alone is tested there: no extra is left out."""
    extras = {folder: set(package.project.get("optional-dependencies", {})) for folder, package in PACKAGES.items()}
    assert members("all") == {folder: found - IN_A_LANE for folder, found in extras.items()}
    assert members("triton") == {"forge-accel": {"liger"}, "forge-algos": {"bitsandbytes"}}


def test_the_quickstart_installs_what_it_needs_and_no_more() -> None:
    """The six packages, torch, and the extra with which a GGUF file is read: no test runner, no DeepSpeed, no bitsandbytes."""
    assert members("quickstart") == {folder: ({"gguf"} if folder == "forge-dist" else set()) for folder in PACKAGES}
    assert [re.split(r"[<>=]", line)[0] for line in ENVIRONMENTS["quickstart"]["dependencies"]] == ["torch"]


def test_a_plain_hatch_run_installs_nothing_by_itself() -> None:
    """`hatch run NAME` passes every command on, so that the quickstart does not wait for what only tests need."""
    default = ENVIRONMENTS["default"]
    assert default["detached"] is True
    assert "dependencies" not in default
    for name, command in default["scripts"].items():
        passed_on = re.match(r"hatch (?:-v )?run ([\w-]+):", command)
        assert passed_on[1] in ENVIRONMENTS if passed_on else command.startswith("python3 tools/"), name


@pytest.mark.parametrize("name", ["quickstart", "all", "media"])
def test_torch_is_pinned(name: str) -> None:
    """An open range of torch brings gigabytes of CUDA packages to a machine without a GPU."""
    torch = [line for line in [*ENVIRONMENTS[name]["dependencies"], *installed("forge-algos")] if line.startswith("torch=")]
    assert len(torch) == 2
    assert len(set(torch)) == 1
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", torch[0])


def test_torchvision_is_that_of_torch() -> None:
    """Each release of torchvision is built for one of torch: 0.28 for 2.13."""
    pins = dict(line.split("==") for line in ENVIRONMENTS["media"]["dependencies"] if "==" in line)
    torch, vision = (pins[name].split(".") for name in ("torch", "torchvision"))
    assert (torch[0], vision[0]) == ("2", "0")
    assert int(vision[1]) == int(torch[1]) + 15


def test_the_lane_of_media_reads_every_kind() -> None:
    """What forge-data decodes images, audio and videos with, as its extras name it, is there."""
    (data,) = [each for each in ENVIRONMENTS["media"]["workspace"]["members"] if "forge-data" in str(each)]
    assert data["features"] == ["images", "audio", "video"]
    assert any(line.startswith("torchaudio>=2.11") for line in ENVIRONMENTS["media"]["dependencies"])


FOLDERS = ("docs", "packages", "benchmarks", "tools", "examples")
COMMAND = re.compile(r"hatch (?:-v )?run (?:([a-z]+):)?([a-z_]+)(?![\w.=:-])")
"""`hatch run NAME`, and `hatch run ENVIRONMENT:NAME`."""
PROGRAMS = {"python", "pytest", "pyrefly"}
"""What an environment of the tests has without a script of that name."""


def unknown_commands(text: str) -> list[str]:
    """Commands of a text for which no environment has a script."""
    found = []
    for environment, name in COMMAND.findall(text):
        scripts = inherited(environment or "default", "scripts") if (environment or "default") in ENVIRONMENTS else None
        if name not in (scripts or {}) and not (environment in ENVIRONMENTS and name in PROGRAMS):
            found.append(f"{environment}:{name}" if environment else name)
    return found


def test_a_command_without_a_script_is_found() -> None:
    """The test below finds what it is for."""
    assert unknown_commands("`hatch run quick`, `hatch -v run bench:sft`, `hatch run peers:python x.py`") == []
    assert unknown_commands("`hatch run nothing` and `hatch run bench:nothing`, `hatch run no:sft`") == [
        "nothing", "bench:nothing", "no:sft"
    ]  # fmt: skip


def test_every_command_of_the_pages_is_there() -> None:
    """What pages and sources tell to run with hatch is a script of hatch.toml."""
    files = [
        ROOT / "README.md",
        *(file for folder in FOLDERS for end in ("md", "py") for file in (ROOT / folder).rglob(f"*.{end}")),
    ]
    unknown = {str(file.relative_to(ROOT)): unknown_commands(file.read_text(encoding="utf-8")) for file in files}
    assert {file: names for file, names in unknown.items() if names} == {}


def test_forge_dist_brings_what_transformers_divides_a_model_with() -> None:
    """peft brings accelerate into every environment that tests forge-dist, so that fsdp2 without it fails at users alone."""
    assert "accelerate" in PACKAGES["forge-dist"].required
