"""Orders in which the chips of a mesh form a ring."""

import itertools

Chip = tuple[int, int, int]


def ring(x: int, y: int, z: int) -> list[Chip]:
    """Returns the chips of a mesh, each next to the one before it.

    It starts at `(0, 0, 0)`, and the last chip is next to the first. If a side
    is odd and greater than 1, the order is by rows, and forms no ring. Chips
    in one line are in the line's order.
    """
    sides = [side for side in (x, y, z) if side > 1]
    if len(sides) < 2 or any(side % 2 for side in sides):
        rows = itertools.product(range(z), range(y), range(x))
        return [(column, row, layer) for layer, row, column in rows]
    start = [(0, 0, 0)]
    if z == 1:
        return start + [(a, b, 0) for a, b in _loop(x, y)]
    if y == 1:
        return start + [(a, 0, b) for a, b in _loop(x, z)]
    if x == 1:
        return start + [(0, a, b) for a, b in _loop(y, z)]
    loop = _loop(x, y)
    layers = [loop, loop[::-1]] * (z // 2)
    up = [(a, b, layer) for layer, path in enumerate(layers) for a, b in path]
    return start + up + [(0, 0, layer) for layer in range(z - 1, 0, -1)]


def _loop(width: int, height: int) -> list[tuple[int, int]]:
    """Returns a plane's ring without the corner `(0, 0)`.

    Rows are passed to and fro, but for column 0, which leads back.
    """
    columns = list(range(1, width))
    rows = [columns, columns[::-1]] * (height // 2)
    fro = [(column, row) for row, order in enumerate(rows) for column in order]
    return fro + [(0, row) for row in range(height - 1, 0, -1)]
