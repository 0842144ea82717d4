"""What a package's archives are made of; `hatch run wheels` builds and tries them."""

import pytest
from repository import ROOT, packages


@pytest.mark.parametrize("folder", packages())
def test_every_package_carries_the_licence(folder):
    """A copy, for hatchling puts a link that leads out of the package into a source archive as it is, and pip refuses that."""
    path = packages()[folder].path / "LICENSE"
    assert not path.is_symlink()
    assert path.read_bytes() == (ROOT / "LICENSE").read_bytes()
