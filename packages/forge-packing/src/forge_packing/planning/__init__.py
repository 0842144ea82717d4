"""Lengths and settings of a run → BatchPlan: its steps, figures, check, summary and file.

Imports the package's own files, `ordering` and `dividing`.
"""
