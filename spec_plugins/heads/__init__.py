"""Trained heads as torch modules: the same code trains them and drafts with them."""
