"""Hugging Face's directories in and out: the files, the settings in them, and a family's tree of them (`tree`)."""
