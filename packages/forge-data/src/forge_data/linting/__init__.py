"""Rows, or a store → findings: what would train a model wrongly, by file, row and field.

May import `store`, `tokenizing`, `formats`, `images`, `findings` and `reading`.
"""
