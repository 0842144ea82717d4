"""Rows, or a store → findings: what would train a model wrongly, by file, row and field.

May import `store`, `tokenizing`, `formats`, `findings` and `reading`.
"""
