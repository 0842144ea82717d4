"""Model in memory and its export → proof that they agree, or an error that says where not.

Its files may import `exporting`, `strategies` and their subfolders, `adapters`, `loading`, `ranks` and the package's own files.
"""
