"""Captured updates: files, checks, and what may be concluded."""
