"""Requested compilation and kernels → what a kind of device takes, with the reason."""

from __future__ import annotations

import os
import shutil

from forge_accel._choice import Choice
from forge_accel._errors import AccelError
from forge_accel.fused._liger import check_liger

INDUCTOR = "inductor"
"""Backend of `torch.compile` that writes kernels."""
COMPILE = ("auto", "blocks", "off")
KERNELS = ("auto", "liger", "none")


def choose_compile(requested: str, *, auto: str, device: str) -> Choice[str | None]:
    """Choose the backend that compiles a model's repeated blocks; None where none does.

    Args:
        requested: `auto`, `blocks` or `off`.
        auto: Reason for which `auto` compiles nothing on this device.
        device: Kind of the device.

    Raises:
        AccelError: no such value, or no compiler for this device's code.

    """
    if requested not in COMPILE:
        raise AccelError(f"compile={requested!r} is unknown; known are {', '.join(COMPILE)}.")
    if requested == "off":
        return Choice(None, "off: asked for")
    if requested == "auto":
        return Choice(None, f"off: {auto}")
    if device == "cpu" and (missing := missing_compiler()):
        raise AccelError(f"compile=blocks: {missing}: install one (g++), or set compile=off.")
    return Choice(INDUCTOR, "blocks: asked for; one graph for all blocks of a kind, for rows of any length")


def choose_kernels(requested: str, *, auto: str, device: str) -> Choice[str | None]:
    """Choose the library whose fused kernels compute a model's layers; None for torch's own.

    Arguments and errors are as those of `choose_compile`.
    """
    if requested not in KERNELS:
        raise AccelError(f"kernels={requested!r} is unknown; known are {', '.join(KERNELS)}.")
    if requested == "none":
        return Choice(None, "none: asked for")
    if requested == "auto":
        return Choice(None, f"none: {auto}")
    return Choice("liger", f"liger: asked for; liger-kernel {check_liger(device)}, each layer tried against torch's own first")


def missing_compiler() -> str:
    """Return what is missing to compile for a CPU; empty where torch finds a C++ compiler."""
    named = os.environ.get("CXX")
    if any(shutil.which(name) for name in ([named] if named else ["g++", "clang++", "g++-10", "cl"])):
        return ""
    return f"CXX={named} is not found" if named else "code for a CPU is compiled by a C++ compiler, and there is none"
