"""Model in memory and tokenizer → a GGUF file, proved to hold the same model.

Its files may import every other folder of the package.
"""
