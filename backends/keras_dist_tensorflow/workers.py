"""Communication between workers, by TensorFlow's collectives."""

import contextlib
import math
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

from keras_dist.plugins import Cluster
from keras_dist.plugins import CommunicationOptions
from keras_dist.plugins import Messages
from keras_dist.plugins import RowShard
from keras_dist.plugins import Workers
from keras_dist.plugins import in_packs
from keras_dist.plugins import note_exchange
from keras_dist.plugins import packs
from keras_dist.plugins import parse_device
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.calls import Calls
from keras_dist_tensorflow.cluster import explained
from keras_dist_tensorflow.cluster import interruptible
from keras_dist_tensorflow.cluster import listen_to_own_address
from keras_dist_tensorflow.cluster import local_devices
from keras_dist_tensorflow.cluster import start
from keras_dist_tensorflow.tf_variables import apart
from keras_dist_tensorflow.wire import SUMMED
from keras_dist_tensorflow.wire import from_words
from keras_dist_tensorflow.wire import received
from keras_dist_tensorflow.wire import sendable
from keras_dist_tensorflow.wire import shape_of
from keras_dist_tensorflow.wire import size_of
from keras_dist_tensorflow.wire import to_words
from keras_dist_tensorflow.wire import with_shape_of

# Default seconds that a collective waits for workers that are alive.
TIMEOUT = 600.0
# Seconds that a worker waits at its end for the others to end.
PARTING = 10.0
# Group key. Other groups, such as a native strategy's, count from 1.
_GROUP = 0x6B64
_NUM_KINDS = 8
_FRAMES, _GATHERED = 6, 7
# Most elements of one collective: keys, which include the size, have 31 bits.
_MOST = 2**31 // _NUM_KINDS - 1


class TensorFlowWorkers(Workers):
    """Collectives on one device of each worker, ordered by a token.

    A key is a collective's kind and size, so it never stands for two shapes.
    In a graph, collectives begin without a frame: methods that are called
    there are those for tensors that are alike.
    """

    def __init__(self, cluster: Cluster, options: CommunicationOptions) -> None:
        super().__init__(cluster, options)
        start(cluster, options)
        listen_to_own_address(cluster)
        self._timeout = options.timeout_seconds or TIMEOUT
        devices = local_devices("GPU") or local_devices("CPU")
        self._device = devices[0].name
        self._token = apart(
            lambda: tf.Variable(0.0, trainable=False),
            parse_device(self._device),
        )
        self._is_over = False
        # How many collectives graphs have, to see whether one has any.
        self.num_traced = 0
        self._calls = Calls(cluster, self.recorder)
        self._calls.start(has_pulse=False)
        self.messages = Messages(cluster, self._calls, self._check)
        if cluster.is_chief:
            self.messages.say("the start", "")

    def swap(self, data: np.ndarray) -> np.ndarray:
        words = np.pad(data, (0, -data.size % 4)).view(np.int32)
        kind = _FRAMES if data.size == self._frame_size else _GATHERED
        with tf.device(self._device):
            rows = self._gathered(tf.constant(words), kind)
        gathered = np.stack([row.numpy() for row in rows])
        swapped: np.ndarray = gathered.view(np.uint8)[:, : data.size]
        return swapped

    @property
    def is_tracing(self) -> bool:
        return not tf.executing_eagerly()

    def on_host(self, tensor: object) -> np.ndarray:
        return np.asarray(tf.convert_to_tensor(tensor).numpy())

    def here(self, value: np.ndarray) -> Any:
        with tf.device(self._device):
            return tf.convert_to_tensor(value)

    def sum(
        self,
        tensors: Sequence[Any],
        wire: str | None = None,
        *,
        what: str = "a sum",
    ) -> list[Any]:
        """Sums tensors; large ones of float32 travel as the dtype `wire`."""
        everyone = self._everyones(what, tensors) if tensors else None
        if everyone is None:
            return self.sum_alike(tensors, wire)
        return self._totals(everyone)

    def _everyones(
        self, what: str, tensors: Sequence[Any]
    ) -> list[list[np.ndarray]] | None:
        # In a graph, no size is small: collectives there have no frame.
        eager = tf.executing_eagerly()
        return super()._everyones(what, tensors) if eager else None

    def sum_alike(
        self, tensors: Sequence[Any], wire: str | None = None
    ) -> list[Any]:
        """Sums tensors, last first; float32 travels as the dtype `wire`."""
        with tf.device(self._device):
            tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
            sent = [
                sendable(t, tf.as_dtype(wire))
                if wire and t.dtype == tf.float32
                else sendable(t, t.dtype)
                for t in tensors
            ]
            kinds = [t.dtype for t in sent]
            sizes = [(t.shape.num_elements() or 0) * t.dtype.size for t in sent]
            limit = self.options.bytes_per_pack or math.inf
            totals = in_packs(
                self._sum_packed,
                packs(kinds, sizes, limit, last_first=True),
                sent,
            )
            return list(map(received, totals, tensors))

    def _sum_packed(self, tensors: list[Any]) -> list[Any]:
        """Sums tensors of one dtype over the workers, in one collective."""
        flats = [tf.reshape(tensor, [-1]) for tensor in tensors]
        flat = flats[0] if len(flats) == 1 else tf.concat(flats, 0)
        sizes = [size_of(part) for part in flats]
        parts = tf.split(self._reduced(flat), sizes)
        return [
            tf.reshape(part, shape_of(tensor))
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def gather_alike(self, tensors: Sequence[Any]) -> list[list[Any]]:
        if not tensors:
            return [[] for _ in range(self.cluster.num_workers)]
        with tf.device(self._device):
            tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
            # One word more: TensorFlow crashes on an empty collective.
            words = [*map(to_words, tensors), tf.zeros([1], tf.int32)]
            sizes = [size_of(vector) for vector in words]
            rows = self._gathered(tf.concat(words, axis=0))
            return [
                [
                    from_words(part, t)
                    for part, t in zip(
                        tf.split(row, sizes)[:-1], tensors, strict=True
                    )
                ]
                for row in rows
            ]

    def gather_rows(
        self, tensors: Sequence[Any], shares: Sequence[RowShard]
    ) -> list[list[Any]]:
        if tf.executing_eagerly():
            return super().gather_rows(tensors, shares)
        # One collective, and a second one if a tensor has another size than
        # `rows[w]` on worker `w`.
        rows = [share.rows for share in shares]
        with tf.device(self._device):
            tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
            ragged = [t for t in tensors if t.shape.rank]
            if not ragged:
                return self.gather_alike(tensors)
            local_rows = rows[self.cluster.index]
            are_known = all(isinstance(n, int) for n in rows)
            most = max(rows) if are_known else tf.reduce_max(tf.stack(rows))
            sizes = [tf.shape(t)[0] for t in ragged]
            fits = tf.reduce_all([tf.equal(size, local_rows) for size in sizes])
            padded = [
                _padded(t[:most], most) if t.shape.rank else t for t in tensors
            ]
            everyone = self.gather_alike([fits, *padded])
            all_fit = tf.reduce_all([values[0] for values in everyone])

            def by_rows() -> list[list[Any]]:
                return [
                    [v[:count] if v.shape.rank else v for v in values]
                    for (_, *values), count in zip(everyone, rows, strict=True)
                ]

            def by_sizes() -> list[list[Any]]:
                everyone = self._gather_ragged(tensors)
                if not are_known or len(set(rows)) > 1:
                    return everyone
                return [
                    [
                        _of_known_size(value, t, worker)
                        for value, t in zip(values, tensors, strict=True)
                    ]
                    for worker, values in enumerate(everyone)
                ]

            known = {t.shape[0] for t in ragged} - {None}
            if are_known and known - {local_rows}:
                # Sizes of other branches would hide those that are known.
                return by_sizes()
            result: list[list[Any]] = tf.cond(all_fit, by_rows, by_sizes)
            return result

    def broadcast_alike(self, tensors: Sequence[Any]) -> list[Any]:
        if not tensors:
            return []
        with tf.device(self._device):
            tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
            words = [to_words(tensor) for tensor in tensors]
            if not self.cluster.is_chief:
                words = [tf.zeros_like(vector) for vector in words]
            return [
                from_words(total, t)
                for total, t in zip(self.sum_alike(words), tensors, strict=True)
            ]

    def concatenate(self, tensor: object, axis: int) -> Any:
        if tf.executing_eagerly():
            return super().concatenate(tensor, axis)
        with tf.device(self._device):
            tensor = tf.convert_to_tensor(tensor)
            moved = tensor if axis == 0 else ops.moveaxis(tensor, axis, 0)
            (joined,) = self.concatenate_rows([moved])
            return joined if axis == 0 else ops.moveaxis(joined, 0, axis)

    def concatenate_numbers(
        self, numbers: Sequence[Any], what: str = "a comparison"
    ) -> list[Any]:
        if tf.executing_eagerly():
            return super().concatenate_numbers(numbers, what)
        if not numbers:
            return []  # TensorFlow crashes on an empty collective
        with tf.device(self._device):
            local = tf.stack([tf.cast(number, tf.int32) for number in numbers])
            joined = tf.concat(self._gathered(local), axis=0)
            return list(tf.unstack(joined))

    def concatenate_rows(self, tensors: Sequence[Any]) -> list[Any]:
        """Concatenates the workers' tensors along their first axes."""
        if not tensors:
            return []
        everyone = self._gather_ragged(tensors)
        with tf.device(self._device):
            return [
                tf.concat(parts, axis=0)
                for parts in zip(*everyone, strict=True)
            ]

    def explain(self, error: BaseException) -> BaseException:
        divergence = self._calls.found_in(error)
        if divergence is not None:
            self._is_over = True
            return divergence
        lost = explained(error, self.cluster, self._timeout)
        self._is_over = self._is_over or lost is not error
        return lost

    def _check(self, in_background: bool) -> None:
        """Raises if workers are known to be at different calls."""
        if self._calls.apart is not None:
            raise self._calls.apart

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns errors that a lost worker caused into `WorkerLostError`."""
        try:
            yield
        except tf.errors.OpError as error:
            lost = self.explain(error)
            if lost is error:
                raise
            raise lost from error

    def leave(self, reason: str, failed: bool) -> None:
        self._calls.stop()
        if self._is_over:
            return
        self._is_over = True
        try:
            if failed:
                address = self.cluster.addresses[self.cluster.index]
                runtime_internals.tell_all_workers(
                    f"Worker {self.cluster.index} at {address} {reason}"
                )
            else:
                # Other workers need the chief's server until they end.
                with interruptible():
                    runtime_internals.wait_for_all_workers(
                        "keras_dist/leave", round(PARTING * 1000)
                    )
        except tf.errors.OpError:
            return  # Some worker is lost: there is nothing to wait for.

    def _gather_ragged(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """Gathers tensors whose first axes may differ between workers."""
        count = self.cluster.num_workers
        with tf.device(self._device):
            tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
            ragged = [t for t in tensors if t.shape.rank]
            if not ragged:
                return self.gather_alike(tensors)
            local_rows = tf.stack([tf.shape(t)[0] for t in ragged])
            rows = tf.reshape(self._gathered(local_rows), [count, -1])
            most = iter(tf.unstack(tf.reduce_max(rows, axis=0)))
            padded = [
                _padded(t, next(most)) if t.shape.rank else t for t in tensors
            ]
            everyone = self.gather_alike(padded)
            for worker, values in enumerate(everyone):
                sizes = iter(tf.unstack(rows[worker]))
                for place, tensor in enumerate(tensors):
                    if tensor.shape.rank:
                        values[place] = values[place][: next(sizes)]
            return everyone

    def _reduced(self, flat: Any) -> Any:
        known = flat.shape.num_elements()
        if not known:
            # TensorFlow crashes where nothing is summed. Another worker may
            # know the size where this one does not: both send as much.
            size = tf.size(flat)
            missing = tf.cast(tf.equal(size, 0), tf.int32)
            return self._sent(tf.pad(flat, [[0, missing]]))[:size]
        if known > _MOST:
            return tf.concat(
                [self._reduced(flat[:_MOST]), self._reduced(flat[_MOST:])], 0
            )
        return self._sent(flat)

    def _sent(self, flat: Any) -> Any:
        """Sums a flat tensor with at least one element."""
        with self.explaining():
            reduced = tf.raw_ops.CollectiveReduceV2(
                input=flat,
                merge_op="Add",
                final_op="Id",
                **self._arguments(flat, SUMMED.index(flat.dtype)),
            )
        reduced.set_shape(flat.shape)
        return reduced

    def _gathered(self, flat: Any, kind: int = _GATHERED) -> list[Any]:
        """Gathers a flat int32 tensor; all workers' have the same size."""
        count = self.cluster.num_workers
        with self.explaining():
            joined = tf.raw_ops.CollectiveGatherV2(
                input=flat, **self._arguments(flat, kind)
            )
        rows: list[Any] = tf.unstack(tf.reshape(joined, [count, -1]), num=count)
        for row in rows:
            row.set_shape(flat.shape)
        return rows

    def _arguments(self, flat: Any, kind: int) -> dict[str, Any]:
        if not tf.executing_eagerly():
            self.num_traced += 1
            what = "a gather" if kind == _GATHERED else "a sum"
            note_exchange(f"{what} of {flat.dtype.name}")
        with tf.device("/device:CPU:0"):
            key = tf.convert_to_tensor(size_of(flat)) * _NUM_KINDS + kind
        return {
            "group_size": self.cluster.num_workers,
            "group_key": _GROUP,
            "instance_key": key,
            "ordering_token": [self._token.handle],
            "communication_hint": self.options.implementation.value.lower(),
            "timeout_seconds": self._timeout,
        }


def _padded(tensor: Any, rows: Any) -> Any:
    """Adds rows of zeros to a tensor, up to a number of rows."""
    missing = [[0, rows - tf.shape(tensor)[0]]]
    return tf.pad(tensor, missing + [[0, 0]] * (tensor.shape.rank - 1))


def _of_known_size(tensor: Any, like: Any, worker: int) -> Any:
    """Returns a worker's tensor, refused if its size isn't that of `like`."""
    known = like.shape[0] if like.shape.rank else None
    if known is None:
        return tensor
    size = tf.shape(tensor)[0]
    message = (
        "Workers gather tensors of different sizes. Received: from worker "
        f"{worker}, this number of rows:"
    )
    advice = (
        f"Expected: {known}, as on this worker. Sizes that differ between "
        "replicas must be found while the graph runs, for instance by "
        "`tf.boolean_mask`, not in Python."
    )
    check = tf.debugging.Assert(tf.equal(size, known), [message, size, advice])
    with tf.control_dependencies([check]):
        return with_shape_of(tf.identity(tensor), like)
