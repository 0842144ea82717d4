"""Objectives: what a batch must hold, which forward passes are made, and which loss; all driven by the one `train`."""

from forge_algos.objectives._head import Head, choose_head
from forge_algos.objectives._objective import Objective
from forge_algos.objectives._sft import SFT

__all__ = ["Head", "Objective", "SFT", "choose_head"]
