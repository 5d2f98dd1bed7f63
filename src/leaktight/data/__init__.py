"""Data sets, how clients share them, and downloads."""
