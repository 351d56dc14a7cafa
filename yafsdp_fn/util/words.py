"""Numbers in words: `counted(1, "batch")` is "1 batch", `counted(4096, "batch")` "4,096 batches"."""


def counted(number: int, noun: str) -> str:
    """Writes a number and its noun, in the plural unless there is one of it."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"
