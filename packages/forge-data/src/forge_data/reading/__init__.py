"""`data_path` → raw records with their place: files, URLs, saved datasets, the Hub.

No module here knows a row format.

May import the package's own modules only.
"""
