"""Distributions of a student and a teacher → the divergence between them.

Files here import losses, and what losses may import.
"""
