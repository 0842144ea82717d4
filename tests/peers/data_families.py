"""The chat families of forge-data's own tests; its folder is no package, and tools/ has a module of the same name."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("forge_data_families", Path(__file__).parents[1] / "forge-data" / "families.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
FAMILIES = _MODULE.FAMILIES
