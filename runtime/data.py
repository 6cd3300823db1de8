"""Byte-level text: batches that every rank draws alike, without talking to the others."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from optpipe import sections
from optpipe.config import Config, DataConfig
from optpipe.errors import InputError

#: A token is a byte.
VOCABULARY = sections.VOCABULARY
#: Folders under the standard library that are not of it, or that some systems leave out.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, uint8 (n,): what is trained on, and what is held out."""

    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls, data: DataConfig, context: int, file: str = "") -> Corpus:
        """Read the text files of a config, in the order of their names, so that every rank has the same.

        Parameters
        ----------
        data
            The config's section.
        context
            Tokens of a sequence; each part must hold at least one sequence and its next byte.
        file
            The config's file, for messages.

        Raises
        ------
        InputError
            There is no such folder, no file in it, or too little text.
        """
        if data.folder is None:
            files, where = _standard_library(data.pattern or "*.py"), "the Python standard library"
        else:
            files, where = _text_files(Path(data.folder), data.pattern or "*", file), data.folder
        train: list[np.ndarray] = []
        validation: list[np.ndarray] = []
        left = data.max_bytes
        for path in files:
            if left <= 0:
                break
            text = np.frombuffer(_read(path, left, file), np.uint8)
            left -= len(text)
            cut = len(text) - int(len(text) * data.validation_fraction)
            train.append(text[:cut])
            validation.append(text[cut:])
        corpus = cls(_joined(train), _joined(validation))
        short = "validation" if data.validation_fraction and len(corpus.validation) <= context else ""
        if short or len(corpus.train) <= context:
            found = len(corpus.validation) if short else len(corpus.train)
            raise InputError(
                file,
                "data.folder",
                f"{len(files)} files of {where} give {found} bytes for {short or 'training'}, "
                f"expected more than model.context ({context})",
            )
        return corpus


def check(config: Config) -> None:
    """Read the text of a config once, before any rank starts.

    Raises
    ------
    InputError
        There is no such text, or too little of it for what the config asks.
    """
    Corpus.load(config.data, config.gpt.context, config.file)
    if config.train.validate_every is not None and not config.data.validation_fraction:
        raise InputError(config.file, "train.validate_every", "needs held-out text, expected a validation_fraction")


def batch(text: Tensor, seed: int, step: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The batch of a step: the same on every rank and machine, whatever was drawn before.

    Parameters
    ----------
    text
        uint8 (n,).
    seed, step
        They alone settle the batch.
    shape
        (microbatches, microbatch size, context).

    Returns
    -------
    tuple of Tensor
        Tokens and targets (the tokens one further on), both int64 of ``shape``.
    """
    microbatches, size, context = shape
    generator = np.random.Generator(np.random.PCG64([seed, step]))
    first = generator.integers(0, len(text) - context, (microbatches, size, 1))
    places = torch.from_numpy(first + np.arange(context + 1))
    window = text[places].long()
    return window[..., :-1].contiguous(), window[..., 1:].contiguous()


def batch_shape(config: Config) -> tuple[int, int, int]:
    """(microbatches, microbatch size, context) of a step, over all pipelines side by side and all runs of the plan."""
    count = config.batch.microbatches * config.batch.accumulate * config.train.pipelines
    return count, config.batch.microbatch_size, config.gpt.context


def _standard_library(pattern: str) -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return _matching(root, pattern, without=_NOT_LIBRARY)


def _text_files(folder: Path, pattern: str, file: str) -> list[Path]:
    if not folder.is_dir():
        raise InputError(file, "data.folder", f"{folder} is no folder, expected a folder of text files")
    found = _matching(folder, pattern, without=set())
    if not found:
        raise InputError(file, "data.pattern", f"no file under {folder} matches {pattern!r}, expected at least one")
    return found


def _matching(root: Path, pattern: str, without: set[str]) -> list[Path]:
    """Files under ``root`` whose name (or path below it) matches, by path; hidden ones are left out."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in without and not name.startswith("."))
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and path.match(pattern):
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read(path: Path, most: int, file: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(most)
    except OSError as error:
        raise InputError(file, "data.folder", f"{path} cannot be read: {error.strerror or error}") from None


def _joined(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.uint8))
