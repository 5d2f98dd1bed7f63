"""The matching loop: what is sought, what is matched, how alike two updates are. `attack.py` says how to read it."""
