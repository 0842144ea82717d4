"""Words of the command line that mean nothing here."""

from __future__ import annotations

import pytest

import forge
from forge.cli import _app as _cli
from forge.mini._command import main as mini


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["sft", "--lr", "1e-4"], "forge: unknown option --lr: here it is --learning-rate.\n"),
        (
            ["export", "runs/first", "--output-dir", "x", "--quantization", "q4_0"],
            "forge: 2 unknown options:\n  --output-dir: here it is --output\n  --quantization: here it is --dtype\n",
        ),
        (["teach", "--ckpt-output-dir", "x"], "forge: unknown option --ckpt-output-dir: here it is --output.\n"),
        (["sft", "--outtype", "q4_0"], "forge: unknown option --outtype: there is none of such a name.\n"),
        (
            ["generate", "m", "--output-dir", "x"],
            "forge: unknown option --output-dir: here it is `ckpt_output_dir`, a setting "
            "of forge sft and all others that train.\n",
        ),
        (["sft", "--learning_rat=3"], "forge: unknown option --learning-rat: did you mean --learning-rate?\n"),
        (
            ["sft", "--seed", "3", "--load_in_4bit", "--osft", "--blurb", "4"],
            "forge: 3 unknown options:\n  --load-in-4bit: here it is --adapter qlora\n"
            "  --osft: here: a command of its own, forge osft; or --adapter osft\n  --blurb: there is none of such a name\n",
        ),
        (["osft", "inspect", "r", "--laier", "q"], "forge: unknown option --laier: did you mean --layer?\n"),
        (["sft", "--block-size", "4"], "forge: unknown option --block-size: a setting of forge pretrain.\n"),
    ],
)
def test_unknown_options(words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them in one message: another library's name with what it is here, a near one with the nearest, status 2."""
    assert _cli.main(words) == 2
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize("words", [["sft", "--qat", "Q4_K_M"], ["export", "runs/first", "--dtype", "iq4_xs"]])
def test_a_type_that_another_tool_makes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It was said that q4_1 may be meant."""
    assert _cli.main(words) == 2
    said = capsys.readouterr().err
    assert f"llama.cpp's llama-quantize makes {words[-1]}, of what `forge export RUN --format gguf" in said
    assert "Did you mean" not in said
    with pytest.raises(forge.SettingsError, match="llama-quantize makes q4_k_m, of what"):
        forge.export("runs/first", dtype="q4_k_m")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words", [["sft", "--no-keep-best"], ["sft", "--keep_best"], ["sft", "--max-steps=3"], ["data", "stats", "--store", "x"]]
)
def test_known_options_pass(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A switch that is off, underscores, a value after an equals sign, and the words that another package parses."""
    assert _cli.main(words) == 2
    assert "unknown option" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sft", "--model-path", "m", "--keep-best", "true"], "--keep-best takes no value: `--keep-best` alone is true."),
        (["sft", "--keep_best", "False"], "--keep_best takes no value: `--no-keep-best` is false."),
        (["export", "runs/a", "--merge", "false"], "--merge takes no value: without `--merge` it is false."),
    ],
)
def test_a_switch_with_a_value(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The word was taken for a recipe, "true: there is no such recipe"."""
    assert _cli.main(words) == 2
    assert capsys.readouterr().err == f"forge: {said}\n"


@pytest.mark.parametrize("words", [["sft", "--data-path", "-"], ["generate", "m", "-"], ["export", "-", "--merge"]])
def test_standard_input_is_no_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`-`, of which "unknown option" was said, is told what to do."""
    assert _cli.main(words) == 2
    assert capsys.readouterr().err.startswith("forge: `-` is no file here: write what comes on standard input to a file")


def test_unknown_options_of_a_command_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m forge.mini` begins with its options; it said of an unknown one that another lacks a value."""
    assert mini(["--nonsense", "3", "--lr", "1"]) == 2
    assert capsys.readouterr().err == (
        "forge: 2 unknown options:\n  --nonsense: there is none of such a name\n  --lr: here it is --learning-rate\n"
    )


@pytest.mark.parametrize(
    ("word", "part"), [("stf", "Did you mean 'sft'?"), ("train", "Here it is `forge sft`."), ("xylophone", "Commands: ")]
)
def test_unknown_commands(word: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest one or another library's, and all there are."""
    assert _cli.main([word]) == 2
    said = capsys.readouterr().err
    assert part in said
    assert "Commands: sft, osft, " in said
    assert "generate" in said
