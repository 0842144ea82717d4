"""Layers of a loaded model → the same layers, compiled block by block or computed by fused kernels.

Imports the package's own files.
"""
