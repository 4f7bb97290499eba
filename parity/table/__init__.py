"""One row for each kind of tensor: its two names and how its axes move; rows applied lazily.

Exports `row.Row`, `decoder_table.rows`, `tensors.forward` and `backward`, `bridge` for arrays.
"""
