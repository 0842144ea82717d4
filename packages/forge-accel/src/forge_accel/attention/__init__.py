"""Queries, keys and values of a packed row → what each sample attends to in itself.

Imports the package's own files only: no device is known here by name.
"""
