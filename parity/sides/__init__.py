"""One side of a comparison, run on one input: torchref, jaxmodel or transformers, as NumPy arrays.

Exports `runs`, `probes`, `subject.Reference` and `Subject`, `inputs.inputs`, `witness.of`.
"""
