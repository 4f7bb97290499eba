"""What a comparison found: data (`results.Report`), metrics, and how it is told to people and CI.

Exports `results`, `metrics`, `results.verdict`, and one module a kind of output: console, html ...
"""
