"""Beats of a run's ranks → a rank that stands still is noticed and ended from outside of it.

Imports the package's own files only, and neither torch nor attrs: a guard process starts in hundredths of a second.
"""
