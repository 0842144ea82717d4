"""Fsdp."""
