"""The whole check, of a decoder, of a source with its files, in pytest.

Exports `source_check.check`, `decoder_check.check` and `pytest_plugin`.
"""
