"""What a run reads: sources, tokenizers, rows; docs/data.md."""
