"""`python -m benchmarks ...`: a bench; `python -m benchmarks published ...`: other people's runs, predicted."""

from __future__ import annotations

from train.__main__ import end


def main(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    if argv[:1] == ["published"]:  # imported only when asked for
        from benchmarks.published import main as published

        return published(argv[1:])
    from benchmarks.command import main as bench

    return bench(argv)


if __name__ == "__main__":
    end(main)
