"""Preference."""
