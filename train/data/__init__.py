"""The text of a run: sources, tokenizers, rows; docs/data.md."""
