"""Reading and writing files: one-line errors on the way in, whole files or none on the way out."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from optpipe.errors import InputError

Model = TypeVar("Model", bound=BaseModel)

#: Characters of a file's name that the temporary file beside it has: at most 240 of the 255 bytes of a name.
_NAME_PART = 60

# What pydantic says, in the words of someone who has to mend a file.
_EXPECTED = {
    "missing": "is missing",
    "extra_forbidden": "unknown key",
    "float_type": "expected a number",
    "int_type": "expected an integer",
    "int_from_float": "expected an integer",
    "string_type": "expected text",
    "bool_type": "expected true or false",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping",
    "finite_number": "expected a finite number",
}


def read_text(path: str | Path, *, exact: bool = False) -> str:
    """The text of a UTF-8 file; ``exact``: with the line ends as they are in the file.

    Raises
    ------
    InputError
        The file is missing, unreadable or not text.
    """
    try:
        if exact:
            return Path(path).read_bytes().decode("utf-8")
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(path, "", "no such file") from None
    except IsADirectoryError:
        raise InputError(path, "", "is a folder, expected a file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, "", f"cannot be read: {error}") from None


def read_json(path: str | Path) -> Any:
    """The value of a JSON file. NaN and infinities are refused, they are not JSON; so are numbers beyond any float.

    Raises
    ------
    InputError
        The file is missing or is not JSON, or a mapping has a key twice (the last one would win in silence).
    """
    return parse_json(read_text(path), path)


def parse_json(text: str, path: str | Path) -> Any:
    """The same of a text that was read from ``path``."""

    def refuse(constant: str) -> Any:
        raise InputError(path, "", f"{constant} is not JSON, expected a finite number")

    def number(text: str) -> float:
        if not math.isfinite(found := float(text)):
            raise InputError(path, "", f"{text:.40} is too large, expected a finite number")
        return found

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(keys) > len(found := dict(pairs)):
            twice = next(key for number, key in enumerate(keys) if key in keys[:number])
            raise InputError(path, twice, "is given twice in one mapping")
        return found

    try:
        return json.loads(text, parse_constant=refuse, parse_float=number, object_pairs_hook=mapping)
    except json.JSONDecodeError as error:
        raise InputError(path, f"line {error.lineno}", f"is not JSON: {error.msg}") from None
    except RecursionError:
        raise InputError(path, "", "is not usable JSON: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(path, "", f"is not usable JSON: {str(error).split(':')[0]}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice (the last one would win in silence)."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:  # before merge keys bring in more: those give way to what stands here
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool | type(None)):
            raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"key '{key}' is given twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


# YAML 1.1 takes 3e-4 for text, for want of a dot; everybody who writes a learning rate means a number.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: str | Path) -> Any:
    """The value of a YAML file, loaded safely (nothing in it is executed).

    Raises
    ------
    InputError
        The file is missing or is not YAML.
    """
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: str | Path) -> Any:
    """The same of a text that was read from ``path``."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise InputError(path, f"line {mark.line + 1}" if mark else "", f"is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(path, "", f"is not YAML: {str(error).splitlines()[0]}") from None


def validated(model: type[Model], value: Any, file: str | Path, prefix: str = "") -> Model:
    """``value`` as an instance of ``model``; the first thing wrong with it as one line.

    Parameters
    ----------
    model
        A pydantic model.
    value
        What a file held.
    file
        The file's name, for the error.
    prefix
        The key under which the value stands in the file, for the error.

    Raises
    ------
    InputError
        The value does not fit the model.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        # An unknown key first: it usually explains why another one is missing.
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        context: dict[str, Any] = dict(first.get("ctx") or {})
        own = context.get("key")
        key = own if isinstance(own, str) else _key(first["loc"])
        message = _EXPECTED.get(first["type"]) or first["msg"][0].lower() + first["msg"][1:]
        if first["type"] == "too_short":
            message = f"expected {context['min_length']} or more entries, not {context['actual_length']}"
        elif first["type"] in _EXPECTED and first["type"] not in ("missing", "extra_forbidden"):
            message += f", not {_brief(first['input'])}"
        elif first["type"] == "extra_forbidden":
            message += _hint(model, first["loc"])
        elif own is None and first["type"] != "missing":
            message += f", not {_brief(first['input'])}"
        raise InputError(file, ".".join(part for part in (prefix, key) if part), message) from None


def _key(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _brief(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # as a file spells it
    text = repr(value) if not isinstance(value, dict | list) else {dict: "a mapping", list: "a list"}[type(value)]
    return text if len(text) <= 40 else text[:37] + "..."


def _hint(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """', expected one of ...' where the mapping that holds the unknown key is a model."""
    here: Any = model
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        field = getattr(here, "model_fields", {}).get(part)
        here = _model_in(field.annotation) if field else None
    fields = getattr(here, "model_fields", None)
    return ", expected one of " + ", ".join(fields) if fields else ""


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := _model_in(argument)) is not None:
            return found
    return None


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[IO[str]]:
    """Write a text file whole or not at all: a temporary file beside it, then a rename.

    A link stays, the file that it names is written. Half a character (a lone surrogate, which JSON can hold) becomes a
    question mark.

    Raises
    ------
    InputError
        The folder does not exist or cannot be written to, or there is something there that is no file.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise InputError(path, "", "cannot be written: it is no regular file")
        # A part of the name: with what is added all of it may be longer than a name can be.
        handle, name = tempfile.mkstemp(dir=target.parent or Path(), prefix=f".{target.name[:_NAME_PART]}.")
    except OSError as error:
        raise InputError(path, "", f"cannot be written: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except OSError as error:
        raise InputError(path, "", f"cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as JSON, whole or not at all."""
    with whole_file(path) as stream:
        json.dump(value, stream, allow_nan=False, indent=1)
        stream.write("\n")
