"""Recorded conversations: read from logs of many forms, sampled, and turned into token ids.

Training and evaluation read the same files by the same rules.
"""
