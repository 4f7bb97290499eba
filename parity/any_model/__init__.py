"""`jaxtwin.compare`: any torch module against any JAX function, and what is wrong with the port.

Exports `compare.compare`.
"""
