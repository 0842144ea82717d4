"""Stand-in for the package of Gaudi's utilities."""
