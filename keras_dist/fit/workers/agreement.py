"""One comparison for all that workers have to do alike, by name."""

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.plugin.workers import Workers

# What workers compare: a text for each name.
Facts = dict[str, str]

# Words that an error shows, at most.
_MOST = 5
# Characters of a text in errors; others end with a code of the whole.
_LONG = 120


def compare(
    facts: Facts,
    workers: Workers,
    what: str,
    numbers: Sequence[int] = (),
    paths: Mapping[str, str] | None = None,
) -> list[list[int]]:
    """Raises an error that names what differs; all workers call it.

    `paths` say what a name is called here. Returns the `numbers` of each
    worker. That is one collective, unless workers differ.
    """
    sent = [_code_of(facts), *numbers]
    gathered = workers.concatenate_numbers(sent, what)
    everyone = [
        gathered[i : i + len(sent)] for i in range(0, len(gathered), len(sent))
    ]
    _check([received[0] for received in everyone], facts, workers, paths or {})
    return [received[1:] for received in everyone]


def _check(
    codes: Sequence[int],
    facts: Facts,
    workers: Workers,
    paths: Mapping[str, str],
) -> None:
    other = next((i for i, code in enumerate(codes) if code != codes[0]), None)
    if other is None:
        return
    shown = {name: _shortened(text) for name, text in facts.items()}
    everyone = [json.loads(t) for t in workers.texts(json.dumps(shown))]
    first, theirs = everyone[0], everyone[other]
    names = [n for n in {**first, **theirs} if first.get(n) != theirs.get(n)]
    # Those of a whole model come last.
    names.sort(key=lambda name: len(first.get(name, "")) > _LONG)
    differences = [
        f"{name}{paths.get(name, '')}: {first.get(name, 'nothing')} on worker "
        f"0, {theirs.get(name, 'nothing')} on worker {other}"
        for name in names
    ]
    raise ReplicaDivergenceError(
        "Workers are about to compute different things, so they would wait "
        "for each other, or their weights would part.\nReceived: "
        f"{first_of(differences, '; ')}. "
        "Expected: the same call, models, variables, settings and versions on "
        "every worker. Give each worker the whole data and the global batch "
        "size. Each worker takes its own rows. Look for environment variables "
        "that only some workers have, for files that differ, and for code "
        "that only some workers run. A value of your own that may differ, "
        "such as a path, has a name that begins with an underscore."
    )


def first_of(words: Sequence[str], separator: str = ", ") -> str:
    """Returns the first of some words, and how many more there are."""
    more = len(words) - _MOST
    return separator.join([*words[:_MOST], *[f"and {more} more"] * (more > 0)])


def note_of(facts: Facts) -> str:
    """Returns a short text that differs if facts do."""
    return f"{_code_of(facts):x}"


def hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=4).hexdigest()


def _code_of(facts: Facts) -> int:
    """Returns a hash below 2**62."""
    text = json.dumps(facts, sort_keys=True).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _shortened(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:_LONG]}... ({hash_of(text.encode())})"
