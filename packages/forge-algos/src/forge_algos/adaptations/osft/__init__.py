"""Osft."""
