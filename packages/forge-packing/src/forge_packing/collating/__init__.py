"""Samples → flat, padding-free rows; documents → blocks for pretraining.

Imports the package's own files only.
"""
