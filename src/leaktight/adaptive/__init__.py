"""Attackers who know which defense runs and with which settings, but not its secrets: one file for each mechanism."""
