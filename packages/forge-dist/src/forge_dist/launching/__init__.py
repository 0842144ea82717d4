"""Topology and command line → this node's workers, and the exception of the first failure.

Its files may import `ranks`, `environment` and the package's own files.
"""
