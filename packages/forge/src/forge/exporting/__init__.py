"""Exporting."""
