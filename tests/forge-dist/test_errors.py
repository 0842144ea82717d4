"""The family of errors."""

import pickle

import pytest

import forge_dist


@pytest.mark.parametrize(
    ("error", "standard", "status"),
    [
        (forge_dist.ModelError, ValueError, 2),
        (forge_dist.LaunchError, RuntimeError, 2),
        (forge_dist.ExportError, RuntimeError, 1),
        (forge_dist.ForgeDistError, Exception, 2),
    ],
)
def test_an_error_is_of_the_family_and_standard(error, standard, status):
    """Each error has the family's root, a standard ancestor and its exit status, and survives a process border."""
    raised = error("what; where; what to do")
    assert isinstance(raised, forge_dist.ForgeDistError)
    assert isinstance(raised, standard)
    assert raised.exit_status == status
    back = pickle.loads(pickle.dumps(raised))
    assert (type(back), str(back)) == (error, "what; where; what to do")
