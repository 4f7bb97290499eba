"""One side of a comparison, run on one input: torchref, jaxmodel or transformers, as NumPy arrays.

Exports `runs`, `probes`, `runs.Reference` and `Subject`, `inputs.check_inputs`, `witness.find`.
"""
