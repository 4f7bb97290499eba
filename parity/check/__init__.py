"""The whole check, of a decoder, of a source with its files, of any pair of models, in pytest.

Exports `source_check.check`, `decoder_check.check`, `any_model.compare` and `pytest_plugin`.
"""
