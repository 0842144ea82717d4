"""Linting."""
