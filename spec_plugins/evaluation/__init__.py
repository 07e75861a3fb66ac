"""Measures proposers on prompts: what they accept, how fast they make an engine, whether output changes."""
