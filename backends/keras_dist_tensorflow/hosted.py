"""Replicas on keras_dist's own threads, which meet in the caller's thread."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.core.device import Device
from keras_dist.internals.keras_internals import inherit_thread_state
from keras_dist.internals.keras_internals import thread_state
from keras_dist.plugin import threads
from keras_dist.plugin.replica import divergence
from keras_dist.replica.state import current_replica
from keras_dist.replica.state import outside_replicas
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.atomic import Barrier
from keras_dist_tensorflow.variables import native_name


class HostedRound(threads.Round):
    """One run of replicas whose meetings run in the caller's thread.

    Each replica has its own thread. So tapes that are open in the caller's
    thread do not record replicas, and a replica's tapes do not record
    meetings. The caller has turn 0 in the round; replica `i` has turn `i + 1`.

    Args:
        num_replicas: Integer.
        place: `Device` on which meetings compute.
    """

    def __init__(self, num_replicas: int, place: Device) -> None:
        super().__init__(num_replicas + 1)
        self._place = place
        self._barrier = Barrier()

    def play(self, index: int, fn: Callable[[], Any]) -> None:
        def noted() -> Any:
            try:
                return fn()
            except BaseException as error:
                # Set first, so that the base class adds no note: its index
                # counts the caller, and `named` has noted the replica's.
                self.error = self.error or error
                raise

        super().play(index, noted)

    def meet(
        self,
        index: int,
        what: str,
        hold: Callable[[list[Any]], Any],
        value: Any,
    ) -> Any:
        state = current_replica()

        def hold_here(values: list[Any]) -> Any:
            with (
                outside_replicas(state),
                tf.device(native_name(self._place)),
                self._barrier.hold(),
            ):
                return hold(values)

        return super().meet(index + 1, what, hold_here, value)

    def host(self) -> None:
        """Runs the replicas' meetings until every replica has ended."""
        while True:
            super().meet(0, "", list, None)
            arrived, self._waiting = self._waiting, {}
            del arrived[0]
            if not arrived:
                return
            count = len(self.results) - 1
            places = [arrived.get(i + 1, (None,))[0] for i in range(count)]
            if len(set(places)) > 1:
                raise divergence(places)
            values = [arrived[index][1] for index in sorted(arrived)]
            self._result = self._hold(values)

    def _hold_meeting(self) -> None:
        """Does nothing: the host has the next turn and runs the meeting."""


def played(
    pool: threads.BatonPool,
    round_: HostedRound,
    fns: Sequence[Callable[[], Any]],
    devices: Sequence[Device],
) -> list[Any]:
    """Runs replicas on their devices and returns a list of their results.

    Their threads take over the caller's graph, variable creators and summary
    settings. `fns` and `devices` have one element for each replica.
    """
    graph = None
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        # Otherwise threads share the graph's stacks, such as that of devices.
        graph.switch_to_thread_local()
        scope = graph.get_name_scope()
    else:
        scope = ""
    creators = runtime_internals.variable_creators()
    summaries = runtime_internals.summary_settings()

    def on_thread(index: int) -> Any:
        # Only replica 0 writes summaries, or each is written once a replica.
        own = summaries if index == 0 else {**summaries, "writer": None}
        with (
            _in_graph(graph, scope, index),
            runtime_internals.in_place_of(creators, own),
            tf.device(native_name(devices[index])),
        ):
            return tf.autograph.experimental.do_not_convert(fns[index])()

    each = [functools.partial(on_thread, index) for index in range(len(fns))]
    results: list[Any] = pool.run(round_, [round_.host, *each])
    return results[1:]


@contextlib.contextmanager
def _in_graph(graph: Any, scope: str, index: int) -> Iterator[None]:
    """Makes this thread add operations to the graph that the caller traces."""
    if graph is None:
        yield
        return
    own = f"{scope}/" if scope else ""
    with graph.as_default():
        # A name that ends with a slash is entered again as it is.
        name = f"{own}replica_{index}/" if index else own
        with tf.name_scope(name) if name else contextlib.nullcontext():
            yield


def capture_thread() -> Callable[[], None]:
    """Captures this thread's state in a function that sets it in another."""
    with tf.init_scope():
        state = thread_state()
    return functools.partial(inherit_thread_state, state)
