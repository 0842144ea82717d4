"""Flat values → frozen, validated settings, and the tables of names that they choose from.

Files here import each other alone; no torch is loaded to read settings.
"""
