"""Data sources of the run file: what every section of ``data.sources`` shares, shipped ones, the table of types.

``SOURCE_TYPES`` names each type's value as ``"module:attribute"``; only its ``section`` (a subclass of ``Source``) is
used here, and it is imported when a run file names the type. How a source is opened is in the same value, which
``muster.data.source_type.SourceType`` describes. Another package adds a type by an entry point of the group
``muster.data_sources`` that names such a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from muster.config.sections.section import NotNegative, Positive, Section
from muster.core.errors import Problem
from muster.core.registry import Registry

FILE_ENDINGS = (
    *(name + packed for packed in ("", ".gz", ".zst") for name in (".jsonl", ".json", ".csv", ".parquet", ".txt")),
    ".arrow",
)
#: Type -> its value. (``Any``: the value's class is above this package; see the module's docstring.)
SOURCE_TYPES: Registry[Any] = Registry(
    family="data source",
    group="muster.data_sources",
    shipped={
        "hub": "muster.data.sources.hub:SOURCE",
        "file": "muster.data.sources.file:SOURCE",
        "text2sql": "muster.tasks.text2sql.source:SOURCE",
        "random": "muster.data.sources.random:SOURCE",
    },
)


def glob_of(path: str) -> str:
    """A pattern of files for a path that names columns in braces: ``db/{db_id}.sqlite`` -> ``db/*.sqlite``."""
    return _COLUMN.sub("*", path)


#: A column in a path: as in templates, a name in braces; braces themselves are doubled.
_COLUMN = re.compile(r"(?<!\{)\{[^{}]+\}(?!\})")


class PromptTemplate(Section):
    """Prompt and completion as Python format strings over a row's columns: ``"Q: {question}\\nSQL: "``."""

    prompt: str
    completion: str
    """The answer, which is what held-out questions expect. A column in it may hold a list of texts, each an acceptable
    answer: the first is trained on."""


class Source(Section):
    """What every data source shares. A type is a subclass that sets ``type`` to its name and answers below."""

    type: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the mixture's rows relative to the other sources."""
    format: Literal["chat", "prompt_completion", "text"] | None = None
    """Default: by the columns present (``messages``, ``prompt``/``completion`` or a template, ``text``)."""
    template: PromptTemplate | None = None
    limit: Positive | None = None
    """Use at most this many rows."""

    has_questions: ClassVar[bool] = False
    """Whether held-out rows ask questions whose answers can be scored."""
    makes_rows: ClassVar[bool] = False
    """Whether rows are generated, in a format of the source's own: then there is nothing to hold out either."""
    is_tokenized: ClassVar[bool] = False
    """Whether rows are token ids already, all supervised."""

    @property
    def has_heldout(self) -> bool:
        """Whether it needs no share of the training rows for evaluation."""
        return self.makes_rows

    @property
    def document_tokens(self) -> int | None:
        """Length of every document, where it is known without reading."""
        return None

    @property
    def files(self) -> Mapping[str, str]:
        """Key -> the path or pattern given there (``glob_of`` where columns are named in it), which may be local."""
        return {}

    @property
    def packages(self) -> Mapping[str, str]:
        """Module that reading needs -> the extra of Muster that installs it."""
        return {}

    def problems(self) -> Iterator[Problem]:
        """What the section's own keys cannot say; a problem's key is relative to the section."""
        yield from ()

    def unused(self) -> Iterator[tuple[str, str]]:
        """(key relative to the section, reason) of keys without effect."""
        if self.makes_rows:
            for name in ("format", "template"):
                yield name, f"a {self.type} source writes its own rows"


class HubSource(Source):
    """A data set on the Hugging Face hub."""

    type: Literal["hub"]
    name: str
    subset: str | None = None
    split: str = "train"
    heldout_split: str | None = None
    revision: str | None = None

    @property
    def has_heldout(self) -> bool:
        return self.heldout_split is not None

    @property
    def packages(self) -> Mapping[str, str]:
        return {"huggingface_hub": "data"}


class FileSource(Source):
    """Files here or in a bucket (``gs://``, ``s3://``): .jsonl, .json, .csv (the first line names the columns),
    .parquet, .txt, each also .gz or .zst, and .arrow."""

    type: Literal["file"]
    path: str
    """A file, a glob, or a folder: of files of one kind, or as ``save_to_disk`` of Hugging Face's datasets writes one.
    A .txt file is one row, and one over 4 MB several, cut at line ends."""
    heldout_path: str | None = None
    database: str | None = None
    """SQLite file that gold and predicted queries of this source run against (execution accuracy), or one for each row:
    columns in braces, as in Spider's ``database/{db_id}/{db_id}.sqlite``."""

    has_questions: ClassVar[bool] = True

    @property
    def has_heldout(self) -> bool:
        return self.heldout_path is not None

    @property
    def files(self) -> Mapping[str, str]:
        given = {"path": self.path, "heldout_path": self.heldout_path, "database": self.database}
        return {key: path for key, path in given.items() if path is not None}

    @property
    def packages(self) -> Mapping[str, str]:
        needed = {"pyarrow": "data"} if any(kind in self.path for kind in (".parquet", ".zst", ".arrow")) else {}
        modules = {"gs": "gcsfs", "s3": "s3fs"}
        return needed | {modules[kind]: extra for kind, extra in _BUCKETS.items() if self.path.startswith(f"{kind}://")}

    def problems(self) -> Iterator[Problem]:
        for key, path in (("path", self.path), ("heldout_path", self.heldout_path)):
            if path is not None and not path.endswith((*FILE_ENDINGS, "/")) and "." in path.rpartition("/")[2]:
                yield Problem(
                    key,
                    f"{path!r} is not a supported kind of file",
                    hint="jsonl, json, csv, parquet or txt, each also .gz or .zst; arrow; a folder's name ends in /",
                )
        if self.database and re.search(r"[{}]", _COLUMN.sub("", self.database.replace("{{", "").replace("}}", ""))):
            yield Problem(
                "database", f"{self.database!r} has a brace too many", hint="columns: {name}; braces: {{ and }}"
            )


#: Scheme -> the extra of Muster that reads it.
_BUCKETS = {"gs": "gcs", "s3": "s3"}


class RandomSource(Source):
    """Random tokens, for benchmarks without data."""

    type: Literal["random"]
    rows: Positive = 4096
    row_length: Positive | None = None
    """Tokens a row; default the sequence length (one document a sequence)."""
    seed: NotNegative = 0

    makes_rows: ClassVar[bool] = True
    is_tokenized: ClassVar[bool] = True

    @property
    def document_tokens(self) -> int | None:
        return self.row_length

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        yield "limit", "`rows` says how many"
