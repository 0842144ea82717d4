"""Seed and position in the run → samples: shuffled epochs, and mixtures of weighted sources.

Imports the package's own files only.
"""
