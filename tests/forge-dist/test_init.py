"""The door of forge_dist."""

import subprocess
import sys

import pytest

import forge_dist


def test_every_public_name_is_there():
    """`__all__` is sorted and each of its names can be had."""
    assert forge_dist.__all__ == sorted(forge_dist.__all__)
    for name in forge_dist.__all__:
        assert getattr(forge_dist, name) is not None
        assert name in dir(forge_dist)


def test_an_unknown_name_is_refused():
    """A name that is not public is an AttributeError that says it."""
    with pytest.raises(AttributeError, match="load_modle"):
        forge_dist.load_modle  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "forge_dist.ModelSettings(model_path='a/b')",
        "forge_dist.check_model_path('a/b')",
        "forge_dist.topology(forge_dist.LaunchSettings(), environ={})",
        "forge_dist.write_text_atomically(sys.argv[1], 'text')",
    ],
)
def test_what_runs_before_the_model_loads_no_framework(use, tmp_path):
    """Settings and preflight checks answer with neither torch nor transformers imported."""
    code = f"import sys, forge_dist; {use}; print(sorted({{'torch', 'transformers', 'peft'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
