"""Heads and drafts trained on one's own traffic."""
