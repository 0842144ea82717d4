"""Samples of two tokenizers → the spans of text that both cut at the same places.

May import `tokenizing`, and the package's own modules.
"""
