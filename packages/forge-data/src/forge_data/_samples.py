"""The old names, until their users are on `_formats` and `_sample_types`."""

from forge_data._formats import convert as parse
from forge_data._formats import detect as shape_of
from forge_data._sample_types import Chat, Sample, Text

__all__ = ["Chat", "Sample", "Text", "parse", "shape_of"]
