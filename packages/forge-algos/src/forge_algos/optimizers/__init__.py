"""A model and settings → its optimizer and its learning-rate schedule.

Files here import the package's own files and settings.
"""
