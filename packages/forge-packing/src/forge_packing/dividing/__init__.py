"""Lengths of the samples of a step → micro-batches of each rank; lower bounds.

Imports the package's own files and `dividing/kernels`.
"""
