"""The matching loop: what is sought, what is matched, and how alike two updates are."""
