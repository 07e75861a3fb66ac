"""Acme's proposers for spec-plugins."""
