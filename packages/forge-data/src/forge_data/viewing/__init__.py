"""Viewing."""
