"""Peft."""
