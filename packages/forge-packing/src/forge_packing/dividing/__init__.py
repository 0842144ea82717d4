"""Dividing."""
