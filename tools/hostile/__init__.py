"""Kinds of hostile tries for tools/torture.py: one module per kind, each with `KIND`."""
