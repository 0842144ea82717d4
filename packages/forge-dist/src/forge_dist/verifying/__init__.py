"""Verifying."""
