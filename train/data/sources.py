"""From the settings of a run to what it reads: `training, heldout = open_text(config, tokenizer, ...)`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from train.config import ConfigError, Data
from train.data import files
from train.data.corpus import Corpus
from train.data.documents import Documents, Table, TextFiles
from train.data.gathered import Gathered, first_rows
from train.data.mixed import Mixed, shares
from train.data.packing import Packed
from train.data.rows import Rows
from train.data.store import tokenised
from train.data.stream import Stream
from train.data.tokenizer import BYTES, Tokenizer

TRAINING, HELDOUT = "training text", "held-out text"


@dataclasses.dataclass(frozen=True)
class Opening:
    """What the rows of every source are made with."""

    config: Data
    tokenizer: Tokenizer
    cache: Path
    """Where tokens are kept."""
    heldout_rows: int
    """How many of them will be read; 0: held-out text is left alone."""

    def rows(self, name: str, found: Documents) -> Rows:
        config = self.config
        if name == HELDOUT and not self.heldout_rows:
            return Gathered(HELDOUT, (), "text that is left alone")
        if not (config.streaming and isinstance(found, Table)):
            return Packed(name, tokenised(found, self.tokenizer, self.cache), config.seq_len, config.packing)
        block = config.shuffle if name == TRAINING else 1  # held-out text is read no further than it must be
        stream = Stream(name, found, self.tokenizer, config.seq_len, config.packing, block)
        return stream if name == TRAINING else first_rows(stream, self.heldout_rows)


def open_text(config: Data, tokenizer: Tokenizer, cache: Path, heldout_rows: int) -> tuple[Rows, Rows]:
    """`(training, held-out)` rows; the same on every rank that sees the same sources. Arguments as in `Opening`."""
    opening = Opening(config, tokenizer, cache, heldout_rows)
    parts: list[tuple[Rows, Rows]] = []
    if config.files or not config.datasets:
        training, heldout = files.split(config)
        if config.tokenizer == BYTES and config.packing == "stream":  # straight from the files, with no copy
            parts.append((Corpus.of(TRAINING, training, config.seq_len), Corpus.of(HELDOUT, heldout, config.seq_len)))
        else:
            texts = TextFiles(tuple(training)), TextFiles(tuple(heldout))
            parts.append((opening.rows(TRAINING, texts[0]), opening.rows(HELDOUT, texts[1])))
    for source in config.datasets:
        tables = halves(config, source)
        parts.append((opening.rows(TRAINING, tables[0]), opening.rows(HELDOUT, tables[1])))
    if len(parts) == 1:
        return parts[0]
    weights = config.weights or (1.0,) * len(parts)
    if len(weights) != len(parts):
        raise ConfigError(f"data.weights: {len(weights)} weights for {len(parts)} sources, data.files being the first")
    shares(weights)
    return Mixed(TRAINING, tuple(one for one, _ in parts), weights), Mixed(
        HELDOUT, tuple(one for _, one in parts), weights
    )


def documents(config: Data) -> list[Documents]:
    """The training documents of all sources, as `train tokenizer` learns from them."""
    texts = [TextFiles(tuple(files.split(config)[0]))] if config.files or not config.datasets else []
    return [*texts, *(halves(config, source)[0] for source in config.datasets)]


def halves(config: Data, source: str) -> tuple[Table, Table]:
    """`(training, held-out)` documents of one dataset: by split, by files, or by the hash of each text."""
    table = Table.of(source, config.column, split=config.split, streaming=config.streaming)
    if config.heldout_split:
        if table.paths:
            raise ConfigError(
                f"data.heldout_split is of datasets with a name; {source!r} is local: --data.heldout-files"
            )
        return table, dataclasses.replace(table, split=config.heldout_split)
    if config.heldout_files and not config.files:
        return table, _local_heldout(config)
    fraction = config.heldout_fraction
    return (
        dataclasses.replace(table, fraction=fraction, side="training"),
        dataclasses.replace(table, fraction=fraction, side="held-out"),
    )


def _local_heldout(config: Data) -> Table:
    return Table.local(config.heldout_files, config.column, "data.heldout_files")
