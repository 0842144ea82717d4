"""Imports of a rank, made once in the server that ranks are forked from: a rank that is forked starts with them.

Each package is loaded whole, public name by public name, as far as it is installed: a leaf's own environment holds no other.
"""

import gc
import sys
from importlib import import_module

PACKAGES = ("forge_accel", "forge_packing", "forge_data", "forge_dist", "forge_algos", "forge")
LIBRARIES = (
    *("pytest", "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"),
    # transformers asks accelerate whether a model that it writes is wrapped, and that asks deepspeed.
    *("peft", "accelerate", "deepspeed", "forge.run._run"),
)


def load(name: str) -> None:
    """Import a library, or every public name of a package, where it is installed."""
    try:
        module = import_module(name)
        for public in module.__all__ if name in PACKAGES else ():
            getattr(module, public)
    except ImportError:
        pass


def warm() -> None:
    """Make what the first run of a process would, and every rank is one: regular expressions of weights' names, a page."""
    try:
        import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
        import_module("forge._templates")._environment().get_template("reports/pages/report.html")
    except ImportError:
        pass


gc.disable()
for library in (*LIBRARIES, *PACKAGES):
    load(library)
warm()
gc.enable()
# A collection in a rank looks at what the rank made, and copies no page of what it shares with the server.
gc.collect()
gc.freeze()

if __name__ == "__main__":
    # In CI, before several processes would each compile what tests import, and write every test file's asserts anew.
    # That plug-ins were imported already is no matter here.
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(import_module("pytest").main([*options, "tests"]))
