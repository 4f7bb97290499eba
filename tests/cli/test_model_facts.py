"""Text in and out: one first token, special tokens as the reference reads them, spare rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from jaxtwin.cli.model_facts import Continuation, continuation
from jaxtwin.tests.helpers.folders import edit_config, hf_folder

WORDS = ["<unk>", "<s>", "</s>", "a", "b", "c", "d"]
BOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with 23 rows, and a tokenizer of 7 words that puts <s> in front by itself."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w in WORDS[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    out = edit_config(hf_folder(tmp_path_factory.mktemp("speak") / "hf"), bos_token_id=BOS)
    tokenizer.save(str(out / "tokenizer.json"))
    return out


def said(folder: Path, prompt: str, tokens: int = 1) -> dict[str, object]:
    wanted = Continuation(prompt, tokens=tokens, stop=False)
    return continuation(str(folder), wanted, lambda step: None)


@pytest.mark.parametrize("prompt", ["a b", "<s> a b", "<s>a b"])
def test_there_is_exactly_one_first_token(folder: Path, prompt: str) -> None:
    """The tokenizer puts it there; a template may have done so before (case 96)."""
    assert said(folder, prompt)["prompt_ids"] == [BOS, 3, 4]


@pytest.mark.parametrize("prompt", ["a<s> b", "<s>uns", "a b</s>", "a </s> b", "d"])
def test_special_tokens_are_read_as_transformers_reads_them(folder: Path, prompt: str) -> None:
    """Case 97, with the settings of the folder's own tokenizer."""
    import transformers

    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = reference(prompt)["input_ids"]
    want = ids[1:] if ids[:2] == [BOS, BOS] else ids
    assert said(folder, prompt)["prompt_ids"] == want


def test_rows_without_a_word_are_never_chosen(folder: Path) -> None:
    """23 rows and 7 words: what is said can be read back (case 94)."""
    new = np.array(said(folder, "a b c", 12)["new_ids"])
    assert len(new) == 12
    assert (new < len(WORDS)).all()
