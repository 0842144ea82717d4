"""Launch settings, PET_*, SLURM and torchrun variables → topology: what this process is.

Its files may import the package's own files only, and no torch.
"""
