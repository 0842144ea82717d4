"""YAML of Axolotl, LLaMA-Factory or TRL, a script of ms-swift → a recipe, and what is lost.

Files here import `settings`, the package's own top-level modules and the leaf packages, no other folder of `forge`.
"""
