"""Model path → a model that DeepSpeed's ZeRO trains: strategies zero1, zero2 and zero3.

Its files may import `strategies`, and what that may import; `deepspeed` only within functions.
"""
