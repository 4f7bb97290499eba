"""Training side by side: torch.optim.AdamW and `train`'s optimizer, step by step and step alone.

Exports `training_check.train` and `plan`; `trajectory` alone sees `train`.
"""
