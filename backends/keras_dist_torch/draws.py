"""Random draws for the global batch, made once for all replicas of a worker.

PyTorch's generators can't skip: what they give for a row may depend on the
number of rows. So the first replica of a worker draws for all rows, as one
device, and the others take their rows from that.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import TypeVar

import torch

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import APART
from keras_dist.plugins import DIVERGED
from keras_dist.plugins import GUESSED
from keras_dist.plugins import SEED_STRIDE
from keras_dist.plugins import Draw
from keras_dist.plugins import DrawnRows
from keras_dist.plugins import MisjudgedDraws
from keras_dist.plugins import Places
from keras_dist.plugins import drawn_by
from keras_dist.plugins import rows_at
from keras_dist.plugins import rows_by_size
from keras_dist_torch.keras_internals import has_no_seed
from keras_dist_torch.keras_internals import mask_of_dropout
from keras_dist_torch.torch_internals import is_in_backward

# The states of generators.
States = list[tuple[torch.Generator, torch.Tensor]]


T = TypeVar("T")


class Draws:
    """The draws of one round, by their place.

    Args:
        replicas: Integer, how many take part here.
        states: `States` of draws without a seed, which they move on; empty
            if there is one replica.
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
        self.is_of_one_replica = not states
        # By place and number there: the draw, what it is, and how many
        # replicas have not taken it.
        self._made: dict[tuple[str, int], list[Any]] = {}

    def take(
        self, place: str, count: int, draw: Draw, make: Callable[[], Any]
    ) -> tuple[Any, States]:
        """Returns what is drawn for all rows, which the first replica makes.

        With it come the states that a draw without a seed is made from.
        """
        entry = self._made.get((place, count))
        what = draw.numbers
        if entry is not None and entry[1] == what:
            if not is_unseeded(draw):
                draw.skip()
            entry[2] -= 1
            if not entry[2]:
                del self._made[place, count]
            made: tuple[Any, States] = entry[0]
            return made
        if is_unseeded(draw):
            before = self._states[:]
            value, self._states[:] = _drawn_from(before, make)
            made = value, before
        else:
            made = make(), []
        if entry is None and self._replicas > 1:
            self._made[place, count] = [made, what, self._replicas - 1]
        return made

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
def seeded_apart(
    devices: Iterable[torch.device], workers: Any, first_replica: int
) -> Iterator[States]:
    """Seeds PyTorch's generators otherwise inside, and on each worker.

    Outside they stay equal on all workers, so that all shuffle alike. Yields
    the states outside, from which draws for all rows go on.
    """
    gpus = [device.index for device in devices if device.type == "cuda"]
    if gpus:
        torch.cuda.init()  # or there are no generators yet
    of_gpus = [torch.cuda.default_generators[index] for index in gpus]
    outside = _states_of([torch.default_generator, *of_gpus])
    try:
        seed = int(torch.randint(2**62, ())) + SEED_STRIDE * first_replica
        # Not `torch.manual_seed`: it records the caller's stack once for each
        # kind of accelerator that is not there.
        for generator, _ in outside:
            generator.manual_seed(seed)
        before = _states_of(generator for generator, _ in outside)
        yield outside
        is_used = not all(
            torch.equal(generator.get_state(), state)
            for generator, state in before
        )
    finally:
        _set(outside)
    if is_used:
        if workers is not None and workers.look is not None:
            workers.look.draws(is_compilable=False)
        # Gives the next step another seed. A step that draws nothing leaves
        # the generator as one device would.
        torch.randint(2**62, ())


def _states_of(generators: Iterable[torch.Generator]) -> States:
    return [(generator, generator.get_state()) for generator in generators]


def _set(states: States) -> None:
    for generator, state in states:
        generator.set_state(state)


def _drawn_from(states: States, make: Callable[[], Any]) -> tuple[Any, States]:
    """Returns what is drawn from states, and the ones after that.

    The generators themselves stay as they are.
    """
    generators = [generator for generator, _ in states]
    own = _states_of(generators)
    _set(states)
    value = make()
    after = _states_of(generators)
    _set(own)
    return value, after


class ReplicaDraws:
    """The draws of one replica."""

    def __init__(
        self, replica: Any, draws: Draws, device: torch.device
    ) -> None:
        self.of_round = draws
        self._replica = replica
        self._device = device
        self._counts: dict[str, int] = {}
        # The states that draws are made from, for those who note them; and
        # where a function runs again, those to make its draws from.
        self._noted: list[list[States]] = []
        self._again: Iterator[States] | None = None

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def draw(self, draw: Draw) -> Any:
        """Returns the replica's rows of a draw."""
        share = self._replica.share
        sizes = [int(size) for size in draw.shape]
        place = f"{draw.where}|{draw.name}|{len(sizes)}"
        axis = self._axis(place, sizes)
        if self._replica.look is not None:
            self._replica.look.draws(axis == 0 and is_unseeded(draw))
        if self.of_round.is_of_one_replica:
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
        make = functools.partial(_for_all, draw, rows, parameters, sizes)
        with torch.no_grad():
            whole = self._whole(place, draw, make).to(self._device)
        # `data`, because autograd would take an in-place change of a part for
        # a change of the others.
        part = (whole if rows is None else rows.cut(whole)).data
        if draw.name != "dropout":
            return draw.of(part)
        inputs = draw.arguments["inputs"]
        if is_unseeded(draw):
            return inputs * part
        return torch.where(part, inputs / (1.0 - draw.arguments["rate"]), 0.0)

    def _whole(self, place: str, draw: Draw, make: Callable[[], Any]) -> Any:
        can_be_again = is_unseeded(draw)
        if self._again is not None and can_be_again:
            states = next(self._again)
            whole, _ = _drawn_from(states, make)
        else:
            if can_be_again and is_in_backward():
                raise _unknown_checkpoint(draw)
            count = self._counts[place] = self._counts.get(place, 0) + 1
            whole, states = self.of_round.take(place, count, draw, make)
        if can_be_again:
            for noted in self._noted:
                noted.append(states)
        return whole

    def repeatable(self, function: Callable[..., T]) -> Callable[..., T]:
        """Has a function draw the same when it is called again.

        A checkpoint of activations calls it once more in the backward pass,
        maybe in another thread, and restores generators as they were inside.
        Draws without a seed are made from states of their own.
        """
        noted: list[States] = []
        calls = itertools.count()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            before = self._noted, self._again
            if next(calls):
                self._again = iter(noted)
            else:
                self._noted = [*self._noted, noted]
            try:
                with drawn_by(self.draw):
                    return function(*args, **kwargs)
            finally:
                self._noted, self._again = before

        return call

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


def _unknown_checkpoint(draw: Draw) -> UnsupportedModelError:
    return UnsupportedModelError(
        "A dropout without a seed runs again in the backward pass of a step, "
        f"and needs the mask of its first run. Received: {draw.where}, in a "
        "function that `checkpoint` was given, imported by `from "
        "torch.utils.checkpoint import checkpoint` before there was a "
        "strategy. Expected: `torch.utils.checkpoint.checkpoint(...)`, called "
        "by its whole name, or `keras.RematScope`."
    )
