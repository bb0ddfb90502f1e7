"""Options of the communication between devices and workers."""

import enum
from typing import NamedTuple
from typing import Self


class CommunicationImplementation(enum.Enum):
    """The implementation of collectives between devices.

    `AUTO` leaves the choice to the backend; `RING` and `NCCL` are hints.

    Example:

    >>> keras_dist.experimental.CommunicationImplementation.AUTO.value
    'AUTO'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class _CommunicationOptions(NamedTuple):
    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation
    dtype: str | None


class CommunicationOptions(_CommunicationOptions):
    """Options of collectives between devices.

    Args:
        bytes_per_pack: Integer, at least 0. Values are sent in packs of
            about this many bytes; with 0 the backend chooses.
        timeout_seconds: Float, the longest time that a collective may take,
            or `None`.
        implementation: A `CommunicationImplementation`, or its name.
        dtype: String, `"float16"` or `"bfloat16"`, the dtype in which `float32`
            gradients are sent between workers; `None` for `float32`. Sums above
            65504 overflow in `"float16"`; `"bfloat16"` has the range of
            `float32`, and fewer digits.

    Raises:
        ValueError: If `bytes_per_pack` is negative, or `implementation` or
            `dtype` is something else.

    Example:

    >>> options = keras_dist.experimental.CommunicationOptions(
    ...     bytes_per_pack=50 * 1024 * 1024
    ... )
    >>> options.bytes_per_pack
    52428800
    """

    __slots__ = ()

    def __new__(
        cls,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = (
            CommunicationImplementation.AUTO
        ),
        dtype: str | None = None,
    ) -> Self:
        if bytes_per_pack < 0:
            raise ValueError(
                "`bytes_per_pack` must be at least 0. Received: "
                f"{bytes_per_pack!r}."
            )
        if isinstance(implementation, str):
            implementation = _parse(implementation)
        if not isinstance(implementation, CommunicationImplementation):
            raise ValueError(
                "`implementation` must be a `keras_dist.experimental."
                f"CommunicationImplementation`. Received: {implementation!r} "
                f"of type {type(implementation).__name__}."
            )
        if dtype not in (None, "float16", "bfloat16"):
            raise ValueError(
                "`dtype` must be None, 'float16' or 'bfloat16'. Received: "
                f"{dtype!r}."
            )
        return super().__new__(
            cls, bytes_per_pack, timeout_seconds, implementation, dtype
        )

    def __str__(self) -> str:
        return repr(self).replace(", ", ",", 1)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(bytes_per_pack={self.bytes_per_pack}, "
            f"timeout_seconds={self.timeout_seconds}, "
            f"implementation={self.implementation}"
            + (f", dtype={self.dtype!r})" if self.dtype else ")")
        )


def _parse(name: str) -> CommunicationImplementation:
    names = [each.value for each in CommunicationImplementation]
    if name.upper() not in names:
        raise ValueError(
            f"`implementation` must be one of {names}. Received: {name!r}."
        )
    return CommunicationImplementation(name.upper())


class CollectiveHints(CommunicationOptions):
    """The older name of `CommunicationOptions`, without `implementation`.

    Args:
        bytes_per_pack: Integer, as for `CommunicationOptions`.
        timeout_seconds: Float or `None`, as for `CommunicationOptions`.

    Raises:
        ValueError: If `bytes_per_pack` is negative.

    Example:

    >>> keras_dist.experimental.CollectiveHints(timeout_seconds=5.0)[1]
    5.0
    """

    __slots__ = ()

    def __new__(
        cls, bytes_per_pack: int = 0, timeout_seconds: float | None = None
    ) -> Self:
        return super().__new__(cls, bytes_per_pack, timeout_seconds)


CollectiveCommunication = CommunicationImplementation
