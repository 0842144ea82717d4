"""The machine → an Accelerator: a file for each kind of device, a row in `_registry.py`.

Imports the package's own files, `attention` and `fused`.
"""
