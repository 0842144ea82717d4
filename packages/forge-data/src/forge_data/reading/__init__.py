"""`data_path` → raw records with their place: files, URLs, archives, saved datasets, the Hub; knows no row format.

May import the package's own modules only.
"""
