"""Layers of a loaded model → the same, compiled by block or computed by fused kernels.

Imports the package's own files.
"""
