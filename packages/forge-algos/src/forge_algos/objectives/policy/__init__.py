"""Sampled completions with advantages → policy losses on a model: GRPO, PPO, RLOO.

Files here import objectives, adaptations, heads, and what stands below them.
"""
