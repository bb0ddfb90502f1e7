"""What all runs found out, as JSON and as Markdown for the page of figures."""

NAMES = {"jax": "JAX", "torch": "PyTorch", "tensorflow": "TensorFlow"}
# Of units of numbers: how the report shows them.
SHOWN = {
    "s": lambda value: f"{1e3 * value:.3f} ms",
    "bytes": lambda value: f"{value / 1e6:,.1f} MB",
    "bytes/s": lambda value: f"{value / 1e9:.1f} GB/s",
    "ratio": lambda value: f"{value:.3f}",
    "calls": lambda value: f"{value:,.0f}",
    "": lambda value: f"{value:.1e}",
}


def content(machine, found, is_rehearsal):
    """Returns everything as a dict for JSON.

    Args:
        machine: Dict that describes the machine.
        found: Dict of each backend's lines, as `lines.read` returns them.
        is_rehearsal: Boolean.
    """
    return {
        "machine": machine,
        "is_rehearsal": is_rehearsal,
        "backends": {name: _of(lines) for name, lines in found.items()},
    }


def _of(lines):
    """Returns the items of one backend, by kind."""

    def items(kind):
        return [
            {key: value for key, value in line.items() if key != "kind"}
            for line in lines
            if line["kind"] == kind
        ]

    return {
        "session": next(iter(items("session")), {}),
        "facts": items("fact"),
        "outcomes": items("outcome"),
        "left out": items("left out"),
    }


def markdown(found):
    """Returns the report as Markdown."""
    parts = [_machine(found), _versions(found), _table_of_facts(found)]
    parts += [_outcomes(found), *_not_passed(found), *_left_out(found)]
    return "\n\n".join(parts) + "\n"


def _machine(found):
    machine = found["machine"]
    gpus = [
        f"{gpu['name']} ({gpu['bytes'] / 2**30:.0f} GiB, driver "
        f"{gpu['driver']}, compute capability {gpu['compute capability']})"
        for gpu in machine["gpus"]
    ]
    what = "; ".join(gpus) or "No GPU"
    rehearsal = " A rehearsal on CPU devices." if found["is_rehearsal"] else ""
    return (
        f"{what}. {machine['system']}, {machine['cores']} CPU cores, Python "
        f"{machine['python']}.{rehearsal}"
    )


def _versions(found):
    versions = {}
    for each in found["backends"].values():
        versions |= each["session"].get("versions", {})
    text = ", ".join(f"{name} {each}" for name, each in versions.items())
    return f"Versions: {text}."


def _table_of_facts(found):
    rows = {}
    for backend, each in found["backends"].items():
        for fact in each["facts"]:
            shown = SHOWN[fact["unit"]](fact["value"])
            rows.setdefault(fact["name"], {})[backend] = shown
    return _table(found, "Measured", rows)


def _outcomes(found):
    rows = {}
    for backend, each in found["backends"].items():
        for outcome in each["outcomes"]:
            file = outcome["test"].partition("::")[0]
            row = rows.setdefault(f"`{file}`", {}).setdefault(backend, {})
            row[outcome["outcome"]] = row.get(outcome["outcome"], 0) + 1
    shown = {
        file: {
            backend: ", ".join(f"{n} {word}" for word, n in counts.items())
            for backend, counts in by_backend.items()
        }
        for file, by_backend in rows.items()
    }
    return _table(found, "Checks", shown)


def _table(found, head, rows):
    backends = list(found["backends"])
    heads = [head, *(NAMES[backend] for backend in backends)]
    rules = ["---", *(["---:"] * len(backends))]
    cells = [
        [name, *(row.get(backend, "") for backend in backends)]
        for name, row in rows.items()
    ]
    return "\n".join(
        f"| {' | '.join(line)} |" for line in (heads, rules, *cells)
    )


def _not_passed(found):
    """Yields a list of the checks that failed or were skipped, and why."""
    for backend, each in found["backends"].items():
        lines = {}
        for outcome in each["outcomes"]:
            if outcome["outcome"] != "passed":
                why = outcome["text"].strip().rpartition("\n")[2]
                key = outcome["outcome"], why
                lines.setdefault(key, []).append(outcome["test"])
        texts = [
            f"- {what}, {len(tests)} times, `{tests[0]}` first: {why}"
            for (what, why), tests in lines.items()
        ]
        if texts:
            yield f"{NAMES[backend]}:\n\n" + "\n".join(texts)


def _left_out(found):
    """Yields a list of what a rehearsal could not show, and why."""
    texts = {
        f"- {item['name']}: {item['because']}": None
        for each in found["backends"].values()
        for item in each["left out"]
    }
    if texts:
        yield "Left out in this rehearsal:\n\n" + "\n".join(texts)
