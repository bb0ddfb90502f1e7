"""Random draws for the global batch, made once for all replicas of a worker.

PyTorch's generators can't skip: what they give for a row may depend on the
number of rows. So the first replica of a worker draws for all rows, as one
device, and the others take their rows from that.
"""

import contextlib
import functools
import json
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from keras_dist.plugins import APART
from keras_dist.plugins import DIVERGED
from keras_dist.plugins import GUESSED
from keras_dist.plugins import Draw
from keras_dist.plugins import DrawnRows
from keras_dist.plugins import MisjudgedDraws
from keras_dist.plugins import Places
from keras_dist.plugins import rows_at
from keras_dist.plugins import rows_by_size
from keras_dist_torch.keras_internals import has_no_seed
from keras_dist_torch.keras_internals import mask_of_dropout

# Generators, and their states outside of steps: the same on all workers.
States = list[tuple[torch.Generator, torch.Tensor]]


class Draws:
    """The draws of one round, by their place.

    Args:
        replicas: Integer, how many take part here.
        states: `States` of generators that workers seed differently in steps.
        places: `Places` of the step's draws.
        may_repeat: Boolean, whether the step may begin anew.
    """

    def __init__(
        self,
        replicas: int,
        states: States,
        places: Places | None = None,
        may_repeat: bool = False,
    ) -> None:
        self.places = places
        # Whether nothing has been changed yet that a new beginning would lose.
        self.may_repeat = may_repeat
        self._replicas = replicas
        self._states = states
        # By place and number there: the draw, what it is, and how many
        # replicas have not taken it.
        self._made: dict[tuple[str, int], list[Any]] = {}

    def take(
        self, place: str, count: int, draw: Draw, make: Callable[[], Any]
    ) -> Any:
        """Returns what is drawn for all rows, which the first replica makes."""
        entry = self._made.get((place, count))
        what = draw.numbers
        if entry is not None and entry[1] == what:
            if not is_unseeded(draw):
                draw.skip()
            entry[2] -= 1
            if not entry[2]:
                del self._made[place, count]
            return entry[0]
        common = is_unseeded(draw) and bool(self._states)
        with self._common_states() if common else nullcontext():
            value = make()
        if entry is None and self._replicas > 1:
            self._made[place, count] = [value, what, self._replicas - 1]
        return value

    def compare(self, workers: Any) -> None:
        """Compares what replicas drew, at a rendezvous of all of them."""
        places = self.places
        if places is None or not places.has_new:
            return
        everyone = here = places.take_new()
        if workers is not None:
            texts = workers.texts(json.dumps(here))
            everyone = [draw for text in texts for draw in json.loads(text)]
        if places.compare(everyone):
            if self.may_repeat:
                raise MisjudgedDraws
            places.tell("a step|", GUESSED)

    def end(self) -> None:
        """Ends the round: tells of draws that not all replicas have made."""
        if self.places is not None:
            for place, _ in self._made:
                self.places.tell(place, DIVERGED)
            self.places.end()
        self._made.clear()

    @contextlib.contextmanager
    def _common_states(self) -> Iterator[None]:
        """Draws from generators as they are outside, and moves those on."""
        inside = [generator.get_state() for generator, _ in self._states]
        for generator, state in self._states:
            generator.set_state(state)
        yield
        for place, state in enumerate(inside):
            generator, _ = self._states[place]
            self._states[place] = generator, generator.get_state()
            generator.set_state(state)


class ReplicaDraws:
    """The draws of one replica."""

    def __init__(
        self, replica: Any, draws: Draws, device: torch.device
    ) -> None:
        self.of_round = draws
        self._replica = replica
        self._device = device
        self._counts: dict[str, int] = {}

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def draw(self, draw: Draw) -> Any:
        """Returns the replica's rows of a draw."""
        share, group = self._replica.share, self._replica.group
        sizes = [int(size) for size in draw.shape]
        place = f"{draw.where}|{draw.name}|{len(sizes)}"
        axis = self._axis(place, sizes)
        if self._replica.look is not None:
            self._replica.look.draws(axis == 0 and is_unseeded(draw))
        if share.rows == share.total and group.workers is None:
            return draw.again()
        is_odd = draw.name == "shuffle" and draw.arguments["axis"] < 0
        if axis == APART or is_odd:
            return draw.apart()
        rows = None if axis is None else rows_at(axis, sizes, share)
        if rows is None and draw.name != "dropout":
            return draw.again()
        parameters: dict[str, Any] = {}
        if rows is not None:
            if draw.shuffles(rows.axis):
                draw.warn()
                return draw.apart()
            parameters = draw.gathered(rows, self._replica.parameters_of_all)
        count = self._counts[place] = self._counts.get(place, 0) + 1
        with torch.no_grad():
            whole = self.of_round.take(
                place,
                count,
                draw,
                functools.partial(_for_all, draw, rows, parameters, sizes),
            ).to(self._device)
        # `data`, because autograd would take an in-place change of a part for
        # a change of the others.
        part = (whole if rows is None else rows.cut(whole)).data
        if draw.name != "dropout":
            return draw.of(part)
        inputs = draw.arguments["inputs"]
        if is_unseeded(draw):
            return inputs * part
        return torch.where(part, inputs / (1.0 - draw.arguments["rate"]), 0.0)

    def _axis(self, place: str, sizes: list[int]) -> int | None:
        places, share = self.of_round.places, self._replica.share
        if places is None:
            rows = rows_by_size(sizes, share)
            return None if rows is None else rows.axis
        return places.axis(self._replica.index, place, sizes, share)


def _for_all(
    draw: Draw,
    rows: DrawnRows | None,
    parameters: dict[str, Any],
    sizes: list[int],
) -> Any:
    """Draws for all rows; for a dropout of sizes, the mask of what is kept."""
    if rows is not None:
        sizes = [*sizes]
        sizes[rows.axis] = rows.total
    given = draw.arguments
    if draw.name == "dropout" and not is_unseeded(draw):
        return mask_of_dropout(sizes, given["rate"], given["seed"])
    return draw.for_all(rows, parameters, ones_like)


def is_unseeded(draw: Draw) -> bool:
    """Returns whether Keras draws from PyTorch's own generator."""
    given = draw.arguments
    return (
        draw.name == "dropout"
        and given["noise_shape"] is None
        and (given["seed"] is None or has_no_seed(given["seed"]))
    )


def ones_like(inputs: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Returns ones, in memory in the order of the inputs, as masks are."""
    order = sorted(range(inputs.ndim), key=lambda i: -inputs.stride(i))
    ones = inputs.new_ones([sizes[i] for i in order])
    return ones.permute([order.index(i) for i in range(inputs.ndim)])
