"""Files in and out: one module a format, and in `dialects` one a published naming.

Exports `source.open_source`, `convert.convert` and `loading.decoder`.
"""
