"""Collating."""
