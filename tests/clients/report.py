"""What `python -m clients` prints."""

COLUMNS = {
    "passed": "passed",
    "known": "known",
    "unknown": "fail",
    "passes_again": "pass again",
    "fails_plain": "fail plain",
    "skipped": "skipped",
}


def failures(done):
    """What has to be looked at, a paragraph a test.

    Args:
        done: A `Comparison`.

    Returns:
        String, empty where all is well.
    """
    where = f"{done.backend}, {done.strategy}"
    lines = [
        f"FAILS in the scope, passes plain ({where}): {test}\n    {error}\n"
        for test, error in done.unknown.items()
    ]
    lines += [
        f"PASSES again, take it off known.toml ({where}): {test}\n"
        for test in done.passes_again
    ]
    return "".join(lines)


def table(results):
    """A Markdown table with a row for each comparison.

    Args:
        results: List of pairs of what was run, a string, and `Comparison`.
    """
    rows = [["backend", "strategy", "tests of Keras", *COLUMNS.values()]]
    rows.append(["---"] * 3 + ["---:"] * len(COLUMNS))
    for tests, done in results:
        counts = [str(len(getattr(done, name))) for name in COLUMNS]
        rows.append([done.backend, done.strategy, tests, *counts])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
