"""A model → the same model with PEFT's layers in it or around it.

Files here import adaptations/base, and what it may import.
"""
