"""Tokenizing."""
