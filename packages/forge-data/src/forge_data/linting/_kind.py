"""Sample → kind of the store that it belongs into."""

from forge_data.formats._samples import Preference, Sample, Unpaired
from forge_data.store._manifest import PREFERENCE, SUPERVISED, UNPAIRED


def kind_of(sample: Sample) -> str:
    """Name the kind of the examples that a sample becomes, as in the manifest."""
    return PREFERENCE if isinstance(sample, Preference) else UNPAIRED if isinstance(sample, Unpaired) else SUPERVISED


def two_kinds(kind: str, place: str, first: str, at: str) -> str:
    """Say in a message that a row and the first row are of two kinds."""
    return (
        f"{place} becomes {kind} samples and {at} {first} samples, which are not trained together; prepare them one at a time"
    )
