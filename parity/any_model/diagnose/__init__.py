"""What is wrong with a port: mistakes tried in the torch side's modules and on its values.

Exports `search.search`. The one part of `any_model` that cannot be imported without torch.
"""
