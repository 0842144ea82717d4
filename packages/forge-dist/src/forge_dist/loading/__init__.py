"""Model path → model in memory, every weight read from its files, or an error that says why.

Its files may import the package's own files only.
"""
