"""Integer kernels: sorted lengths and costs of a step → the rank and pass of each sample.

Each is plain Python that numba can compile, and has a name of its own among all kernels. Imports nothing but its siblings.
"""
