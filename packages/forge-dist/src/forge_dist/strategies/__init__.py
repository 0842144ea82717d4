"""Settings and ranks → a `Strategy`: how ranks share a model, its steps and its state.

Its files may import `ranks`, `adapters`, `loading` and the package's own files, but not its subfolders, which the table names.
"""
