"""Batches of text: the same for all who ask, and never of held-out text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.config import DataConfig
from optpipe.errors import InputError
from runtime.data import Corpus, batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(b"1" * 100)
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    (tmp_path / "c.md").write_bytes(b"m" * 100)
    (tmp_path / ".hidden.txt").write_bytes(b"h" * 100)
    return tmp_path


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20))
def test_a_batch_depends_on_seed_and_step_alone(
    seed: int, step: int, microbatches: int, size: int, context: int
) -> None:
    text = torch.arange(21, dtype=torch.uint8)
    shape = (microbatches, size, context)
    tokens, targets = batch(text, seed, step, shape)
    batch(text, seed, step + 1, shape)
    again, _ = batch(text, seed, step, shape)
    assert torch.equal(tokens, again)
    assert tokens.shape == shape and tokens.dtype == torch.int64
    # In this text every byte is followed by its successor.
    assert torch.equal(targets, tokens + 1)


def test_steps_and_seeds_differ() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    drawn = {tuple(batch(text, seed, step, (2, 2, 4))[0].flatten().tolist()) for seed in range(5) for step in range(5)}
    assert len(drawn) == 25


def test_files_come_by_name_and_each_holds_out_its_end(folder: Path) -> None:
    corpus = Corpus.load(DataConfig(folder=str(folder), pattern="*.txt", validation_fraction=0.1), 8)
    assert bytes(corpus.train.tolist()) == b"a" * 90 + b"1" * 90
    assert bytes(corpus.validation.tolist()) == b"a" * 10 + b"1" * 10


def test_no_more_is_read_than_asked_for(folder: Path) -> None:
    corpus = Corpus.load(DataConfig(folder=str(folder), max_bytes=150, validation_fraction=0.0), 8)
    assert bytes(corpus.train.tolist()) == b"a" * 100 + b"1" * 50


def test_the_default_text_is_the_standard_library() -> None:
    corpus = Corpus.load(DataConfig(max_bytes=500_000), 64)
    assert len(corpus.train) + len(corpus.validation) == 500_000
    assert b"import " in bytes(corpus.train.tolist())


@pytest.mark.parametrize(
    ("settings", "context", "message"),
    [
        ({"folder": "none"}, 8, "data.folder: .* is no folder"),
        ({"folder": ".", "pattern": "*.rst"}, 8, r"data.pattern: no file under .* matches '\*.rst'"),
        (
            {"folder": ".", "validation_fraction": 0.0},
            300,
            r"data.folder: 3 files of .* give 300 bytes for training, expected more than",
        ),
        ({"folder": "."}, 15, r"data.folder: 3 files of .* give 15 bytes for validation, expected more than"),
    ],
)
def test_text_that_is_not_there_is_one_line(folder: Path, settings: dict, context: int, message: str) -> None:
    settings = settings | {"folder": str(folder / settings["folder"])}
    with pytest.raises(InputError, match="^some.yaml: " + message):
        Corpus.load(DataConfig(**settings), context, "some.yaml")
