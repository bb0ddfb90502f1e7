"""Random draws for the global batch, made once for all replicas of a worker.

PyTorch's generators can't skip: what they give for a row may depend on the
number of rows. So the first replica of a worker draws for all rows, as one
device, and the others take their rows from that.
"""

import contextlib
import json
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals.keras_internals import layers_in_call
from keras_dist.plugin.draws import Draw
from keras_dist.plugin.draws import Places
from keras_dist.plugin.draws import Rows
from keras_dist.plugin.draws import rows_by_size
from keras_dist.plugin.replica import Replica
from keras_dist_torch.keras_internals import has_no_seed

# Generators, and their states outside of steps: the same on all workers.
States = list[tuple[torch.Generator, torch.Tensor]]


class Draws:
    """The draws of one round, by their position among a replica's.

    Args:
        replicas: Integer, how many take part here.
        states: `States` of generators that workers seed differently in steps.
        places: `Places` of the step's draws.
    """

    def __init__(
        self, replicas: int, states: States, places: Places | None
    ) -> None:
        self.places = places
        self._replicas = replicas
        self._states = states
        # The draw, what it is, and how many replicas have not taken it.
        self._made: dict[int, list[Any]] = {}

    def take(
        self, place: int, what: str, draw: Draw, make: Callable[[], Any]
    ) -> Any:
        """Returns what is drawn for all rows, which the first replica makes."""
        entry = self._made.get(place)
        if entry is None:
            common = is_unseeded(draw) and bool(self._states)
            with self._common_states() if common else nullcontext():
                value = make()
            if self._replicas > 1:
                self._made[place] = [value, what, self._replicas - 1]
            return value
        value, expected, _ = entry
        if what != expected:
            raise _divergence(f"{expected} on one, {what} on another")
        if not is_unseeded(draw):
            draw.skip()
        entry[2] -= 1
        if not entry[2]:
            del self._made[place]
        return value

    def check(self) -> None:
        """Refuses draws that not all replicas have made."""
        for _, what, _ in self._made.values():
            raise _divergence(f"{what} on some replicas only")

    @contextlib.contextmanager
    def _common_states(self) -> Iterator[None]:
        """Draws from generators as they are outside, and moves those on."""
        own = [generator.get_state() for generator, _ in self._states]
        for generator, state in self._states:
            generator.set_state(state)
        yield
        for place, state in enumerate(own):
            generator, _ = self._states[place]
            self._states[place] = generator, generator.get_state()
            generator.set_state(state)


class ReplicaDraws:
    """The draws of one replica."""

    def __init__(
        self, replica: Replica, draws: Draws, device: torch.device
    ) -> None:
        self._replica = replica
        self._draws = draws
        self._device = device
        self._count = 0

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def draw(self, draw: Draw) -> Any:
        """Returns the replica's rows of a draw."""
        share = self._replica.share
        if share.rows == share.total:
            return draw.again()
        self._count += 1
        sizes = [int(size) for size in draw.shape]
        rows = self._rows(draw, sizes)
        if rows is None and draw.name != "dropout":
            return draw.again()
        parameters: dict[str, Any] = {}
        if rows is not None:
            if draw.shuffles(rows.axis):
                draw.warn()
                return draw.apart()
            if rows.size % max(share.rows, 1):
                return draw.apart()  # the values of rows decide how many
            sizes[rows.axis] = rows.total
            parameters = draw.gathered(rows, self._replica.parameters_of_all)
        with torch.no_grad():
            whole = self._draws.take(
                self._count,
                f"`keras.random.{draw.name}` of shape {tuple(sizes)}",
                draw,
                lambda: draw.for_all(rows, parameters, _ones_like),
            ).to(self._device)
        # `data`, because autograd would take an in-place change of a part for
        # a change of the others.
        part = (whole if rows is None else rows.cut(whole)).data
        if is_unseeded(draw):
            return draw.arguments["inputs"] * part
        return draw.of(part)

    def _rows(self, draw: Draw, sizes: list[int]) -> Rows | None:
        places, share = self._draws.places, self._replica.share
        if places is None:
            return rows_by_size(sizes, share)
        place = self._count, draw.name, len(sizes)
        if places.is_looking:
            own = max(share.rows, 1), [*sizes]
            with _own_caches():
                each = self._replica.meet("a random draw", self._every, own)
            places.learn(place, each)
        return places.rows(place, sizes, share)

    def _every(self, here: list[Any]) -> list[Any]:
        """Returns what all replicas of all workers draw."""
        workers = self._replica.group.workers
        if workers is None:
            return here
        texts = workers.texts(json.dumps(here))
        return [each for text in texts for each in json.loads(text)]


@contextlib.contextmanager
def _own_caches() -> Iterator[None]:
    """Restores tensors in attributes of the layers that this thread calls.

    Replicas share layers. Other replicas run meanwhile and may keep tensors
    there, as cells of recurrent layers keep dropout masks in a call.
    """
    before = [
        (vars(layer), {k: v for k, v in vars(layer).items() if _is_cache(v)})
        for layer in layers_in_call()
    ]
    yield
    for attributes, own in before:
        for name, value in [*attributes.items()]:
            if name not in own and _is_cache(value):
                del attributes[name]
        attributes.update(own)


def _is_cache(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(x, torch.Tensor) for x in value)
    return value is None or isinstance(value, torch.Tensor)


def is_unseeded(draw: Draw) -> bool:
    """Returns whether Keras draws from PyTorch's own generator."""
    given = draw.arguments
    return (
        draw.name == "dropout"
        and given["noise_shape"] is None
        and (given["seed"] is None or has_no_seed(given["seed"]))
    )


def _ones_like(inputs: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Returns ones, in memory in the order of the inputs, as masks are."""
    order = sorted(range(inputs.ndim), key=lambda i: -inputs.stride(i))
    ones = inputs.new_ones([sizes[i] for i in order])
    return ones.permute([order.index(i) for i in range(inputs.ndim)])


def _divergence(what: str) -> ReplicaDivergenceError:
    return ReplicaDivergenceError(
        f"Replicas made different random draws: {what}. Expected: the same "
        "draws in the same order on each replica, as one device makes them "
        "for all rows. Look for a branch on values that differ between "
        "replicas, or on Python's or NumPy's random numbers."
    )
