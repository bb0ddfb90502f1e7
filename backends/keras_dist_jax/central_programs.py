"""The compiled programs of a training step with central storage."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from keras_dist_jax.central import Merge
from keras_dist_jax.central import bring
from keras_dist_jax.central import send
from keras_dist_jax.layout import MeshLayout
from keras_dist_jax.partition import Partition
from keras_dist_jax.partition import Update
from keras_dist_jax.running import Values


class FirstPart:
    """A step up to the gradients, on the devices that compute.

    `owners` are the `jax.Device`s that keep each value of the state, `sharding`
    is the batch's, and profiles show `name`.

    Attributes:
        outputs: Positions of the step's outputs that it gives.
        new: Positions in the state that it gives new values of.
        kept: Positions in the state that nothing changes.
    """

    def __init__(
        self,
        partition: Partition,
        mesh: MeshLayout,
        owners: Sequence[Any],
        sharding: Any,
        name: str,
    ) -> None:
        count = partition.num_outputs
        self.outputs = [p for p in partition.gives if p < count]
        self.new = [p - count for p in partition.gives if p >= count]
        self.kept = partition.kept
        self._mesh = mesh
        # A new value can take the memory of the copy that was sent, unless the
        # variable rests on a device that computes: there is no copy then.
        away = {p for p in self.new if owners[p] not in mesh.devices}
        self._donated = [p for p in partition.reads if p in away]
        self._others = [p for p in partition.reads if p not in away]
        order = [*self._donated, *self._others]
        places = [order.index(p) for p in partition.reads]
        call = core.jaxpr_as_fun(partition.first)

        def run(donated: Any, others: Any, batch: Any) -> Any:
            given = [*donated, *others]
            results = iter(call(*(given[p] for p in places), *batch))
            outputs = list(itertools.islice(results, len(self.outputs)))
            new = list(itertools.islice(results, len(self.new)))
            return outputs, new, list(results)

        run.__name__ = run.__qualname__ = name
        self._run = jax.jit(
            run,
            donate_argnums=0,
            in_shardings=(mesh.whole, mesh.whole, sharding),
            out_shardings=(
                mesh.whole if mesh.is_wide else None,
                mesh.whole,
                mesh.whole,
            ),
        )

    def __call__(
        self, state: Sequence[Any], batch: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the outputs, the new values and the updates' inputs."""
        positions = [*self._donated, *self._others]
        sent = send([state[p] for p in positions], self._mesh)
        count = len(self._donated)
        result: tuple[list[Any], list[Any], list[Any]] = self._run(
            sent[:count], sent[count:], batch
        )
        return result


class UpdatePart:
    """An update after the gradients, on one device that keeps variables.

    `owners` are the `jax.Device`s that keep each value of the state, `primary`
    is the first one that keeps variables, and `num_outputs` the number of the
    step's outputs.

    Attributes:
        device: The `jax.Device` that it runs on.
        crossing: Positions of its inputs among the values that the first part
            hands over.
        outputs: Positions of the step's outputs that it gives.
        new: Positions in the state that it gives new values of.
        visitors: Positions in the state of its inputs from other devices.
    """

    def __init__(
        self,
        update: Update,
        owners: Sequence[Any],
        primary: Any,
        num_outputs: int,
    ) -> None:
        self.crossing = update.crossing
        self.outputs = [p for p in update.results if p < num_outputs]
        self.new = [p - num_outputs for p in update.results if p >= num_outputs]
        homes = {owners[p] for p in self.new}
        self.device = homes.pop() if len(homes) == 1 else primary
        self.visitors = [p for p in update.state if owners[p] != self.device]
        self.is_elsewhere = bool(homes)
        replaced = set(self.new)
        self.donated = [p for p in update.state if p in replaced]
        self.read = [p for p in update.state if p not in replaced]
        order = [*self.donated, *self.read]
        places = [order.index(p) for p in update.state]
        call, count = core.jaxpr_as_fun(update.program), len(self.outputs)

        def optimizer_update(donated: Any, read: Any, crossing: Any) -> Any:
            given = [*donated, *read]
            results = call(*(given[p] for p in places), *crossing)
            return results[:count], results[count:]

        self._keep = jax.jit(optimizer_update)
        self._donate = jax.jit(optimizer_update, donate_argnums=0)

    def program(self, donates: bool) -> Any:
        """Returns the compiled update.

        Its arguments are the values that it replaces, which it deletes if it
        `donates`, those that it only reads, and those of the first part.
        """
        return self._donate if donates else self._keep


class StepParts:
    """The programs of a training step for one kind of batch.

    `values` is the state in groups, as shapes; `owners` are the `jax.Device`s
    that keep each value, and `structure` is that of the step's outputs.
    """

    def __init__(
        self,
        first: FirstPart,
        updates: Sequence[UpdatePart],
        values: Sequence[Sequence[Any]],
        owners: Sequence[Any],
        structure: Any,
    ) -> None:
        self.first = first
        self._updates = updates
        self._structure = structure
        places = [(g, i) for g, v in enumerate(values) for i in range(len(v))]
        self._places = places
        self._results = [[places[p] for p in each.new] for each in updates]
        # Values that an update leaves on another device go back to their own.
        is_moved = any(each.is_elsewhere for each in updates)
        self._owners = owners if is_moved else None
        self._targets = [owners[p] for p in first.new]
        for update in updates:
            count = len(update.crossing) + len(update.visitors)
            self._targets += [update.device] * count

    def updates(
        self, state: Values, first: Any, donates: bool
    ) -> tuple[list[Any], Merge]:
        """Returns the updates to run, and the state that they make.

        `state` is the one before the step, in groups, and `first` the result of
        the first part; updates that donate delete the values that they replace.
        """
        _, new, crossing = first
        flat = list(itertools.chain(*state))
        moving = list(new)
        for update in self._updates:
            moving += [crossing[p] for p in update.crossing]
            moving += [flat[p] for p in update.visitors]
        moved = iter(bring(moving, self._targets))
        values = [list(group) for group in state]
        for position in self.first.new:
            group, index = self._places[position]
            values[group][index] = next(moved)
        calls = []
        for update in self._updates:
            taken = [next(moved) for _ in update.crossing]
            here = {p: next(moved) for p in update.visitors}
            donated = [here.get(p, flat[p]) for p in update.donated]
            read = [here.get(p, flat[p]) for p in update.read]
            run = update.program(donates)
            calls.append(map(run, (donated,), (read,), (taken,)))
        return calls, Merge(values, self._results, self._owners)

    def outputs(self, first: Any, results: Sequence[Any]) -> Any:
        """Returns the step's outputs, from the results of its programs."""
        found = dict(zip(self.first.outputs, first[0], strict=True))
        for update, (outputs, _) in zip(self._updates, results, strict=True):
            found.update(zip(update.outputs, outputs, strict=True))
        leaves = [found[place] for place in range(len(found))]
        return jax.tree.unflatten(self._structure, leaves)
