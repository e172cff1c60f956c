"""Scans over stacked layers of other libraries, with a solver: a file for each library."""
