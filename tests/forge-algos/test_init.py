"""The public names: sorted, complete, and light to import."""

import pickle
import subprocess
import sys

import pytest

import forge_algos


def test_all_is_sorted_and_loads():
    """Every public name exists and is listed once, in order."""
    assert forge_algos.__all__ == sorted(forge_algos.__all__)
    assert len(set(forge_algos.__all__)) == len(forge_algos.__all__)
    for name in forge_algos.__all__:
        assert getattr(forge_algos, name).__doc__
        assert name in dir(forge_algos)
    with pytest.raises(AttributeError, match="no_such_name"):
        forge_algos.no_such_name  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import forge_algos", {"torch", "transformers", "peft", "attrs", "numpy"}),
        (
            "import forge_algos; forge_algos.OptimizerSettings, forge_algos.SupervisedSettings, forge_algos.AdapterError",
            {"torch", "transformers", "peft", "numpy"},
        ),
        (
            "import forge_algos; forge_algos.train, forge_algos.SFT, forge_algos.nll, forge_algos.make_optimizer",
            {"transformers", "peft", "schedulefree", "bitsandbytes"},
        ),
    ],
)
def test_what_an_import_loads(code, absent):
    """forge_algos loads nothing; settings and errors no framework; the loop no PEFT."""
    code += "; import sys; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert "forge_algos" in loaded
    assert not absent & loaded
    assert not {name for name in loaded if name.startswith("forge_") and not name.startswith("forge_algos")}


@pytest.mark.parametrize(
    ("name", "standard", "status"),
    [
        ("AdapterError", ValueError, 2),
        ("PackedBatchError", ValueError, 2),
        ("NoTargetsError", ValueError, 2),
        ("OptimizerError", ValueError, 2),
        ("MissingPackageError", ImportError, 2),
        ("DivergedError", FloatingPointError, 1),
    ],
)
def test_errors_are_a_family(name, standard, status):
    """Errors have one root, a standard parent and an exit status, and can be pickled."""
    kind = getattr(forge_algos, name)
    assert issubclass(kind, forge_algos.ForgeAlgosError)
    assert issubclass(kind, standard)
    assert kind.exit_status == status
    assert str(pickle.loads(pickle.dumps(kind("what, where")))) == "what, where"
