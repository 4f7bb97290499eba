"""Are two models the same? Ten rooms, lowest first: each may import those before it.

table         rows between names, and the axis moves of each: the one description of a conversion
report        what a comparison found, in numbers, words and pages
naming        a person's own names for a decoder's tensors
checkpoints   files in and out, one module a format; published namings (dialects)
sides         one run of torch, JAX or transformers on one input, seen through probes
compare       tolerances and budgets; what the two sides were given; error curves
diagnose      from a difference to its proven cause, and a replay of the part at fault
training      optimizer and trajectory side by side (the one room that sees `train`)
check         the whole check: of a decoder, of any model, in pytest
selftest      faults made on purpose, and the kill table that must catch them
"""
