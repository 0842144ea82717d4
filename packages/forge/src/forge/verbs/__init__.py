"""Verbs."""
