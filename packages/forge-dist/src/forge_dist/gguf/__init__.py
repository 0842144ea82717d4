"""Gguf."""
