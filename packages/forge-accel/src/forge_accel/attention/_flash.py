"""FlashAttention 3 and 4 in place of torch's flash kernels, by torch's own activation."""

from __future__ import annotations

from importlib.util import find_spec

import torch.nn.attention

from forge_accel.attention._attention import FLASH

_MODULES = {"FA3": ("flash_attn_interface", "flash_attn_3"), "FA4": ("flash_attn.cute", "flash-attn-4")}
"""Kernels → the module that torch imports them from, and its distribution."""
_CHIPS = {"FA3": (9, 9), "FA4": (9, 10)}
"""Kernels → the first and the last major compute capability that they are for: Hopper, and Hopper to Blackwell."""


def missing_flash(name: str, major: int | None) -> str:
    """Return what these kernels lack here; empty where they can be activated.

    Args:
        name: `flash3` or `flash4`.
        major: Of the chip's compute capability; None for a chip of another maker.

    """
    kernels = FLASH[name]
    module, distribution = _MODULES[kernels]
    least, most = _CHIPS[kernels]
    listed = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
    if kernels not in listed or not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot activate {kernels}"
    if major is None or not least <= major <= most:
        chips = "Hopper (compute capability 9)" if least == most else "Hopper and Blackwell (compute capability 9 and 10)"
        return f"{kernels} is for {chips}, and this chip is not"
    if _not_installed(module):
        return f"{kernels} needs {distribution}, which is not installed (there is no module {module})"
    return ""


def activate_flash(name: str) -> None:
    """Let torch's flash operators, varlen too, run these kernels in this process."""
    kernels = FLASH[name]
    if torch.nn.attention.current_flash_attention_impl() != kernels:
        torch.nn.attention.activate_flash_attention_impl(kernels)


def _not_installed(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:
        return True
