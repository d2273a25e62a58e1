"""Reports on runs: one HTML page, the same numbers in other formats, and comparisons."""
