"""A person's own names for a decoder's tensors: a file of theirs, read into rows or proposed.

Exports `names.read`, `names.Naming` and `propose.propose`.
"""
