"""The check checked: faults made in the JAX side on purpose, and the table that must catch them.

Exports `kill_table.run`, the catalogue in `faults`, and `tiny_models`.
"""
