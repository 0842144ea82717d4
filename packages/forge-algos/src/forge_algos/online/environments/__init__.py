"""Prompts → episodes: turns of the model between the observations of an environment.

Files here import online/sampling, online/rewards, and the package's own files.
"""
