"""How far two runs are apart and how far they may be: tolerances, measured budgets, error curves.

Exports `budgets.working`, `curves.points`, `preflight` and `decoder_settings.Sides`.
"""
