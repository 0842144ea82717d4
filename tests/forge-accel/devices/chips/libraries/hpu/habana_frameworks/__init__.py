"""Stand-in for Intel's habana_frameworks."""
