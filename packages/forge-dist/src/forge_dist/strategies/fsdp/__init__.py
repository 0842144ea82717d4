"""Model path → a model sharded over ranks by PyTorch's FSDP2: strategies fsdp2 and hsdp.

Its files may import `strategies`, and what that may import.
"""
