"""The options of `keras-dist plan`, checked."""

from dataclasses import dataclass

from keras_dist.planning.placement import Placement

STRATEGIES = ("one-device", "mirrored", "central", "multi-worker")

SHARDED = "optimizer sharded"

# Optimizers that can't update a part of a variable without the rest of it.
_NEED_WHOLE_VARIABLES = ("adafactor", "lamb", "muon")


@dataclass(frozen=True)
class Choice:
    """A strategy, and the number of its devices.

    Args:
        strategy: One of `STRATEGIES`.
        devices: Devices that compute on each worker; `None` for 1 with
            `one-device`, else 8.
        workers: `None` for 2 with `multi-worker`, else 1.
        parameter_devices: Devices that keep the variables of `central`.
        is_sharded: Whether replicas share the optimizer's state.
    """

    strategy: str = "mirrored"
    devices: int | None = None
    workers: int | None = None
    parameter_devices: int = 1
    is_sharded: bool = False

    def check(self, optimizer: str | None) -> None:
        """Refuses combinations of options that no strategy supports.

        Raises:
            ValueError: If two options don't go together.
        """
        if self.strategy == "one-device" and (self.devices or 1) > 1:
            raise ValueError(
                f"--devices {self.devices}: one-device computes on one. Leave "
                "it out, or choose another --strategy."
            )
        if self.strategy != "multi-worker" and (self.workers or 1) > 1:
            raise ValueError(
                f"--workers {self.workers}: {self.strategy} has one worker. "
                "Choose --strategy multi-worker."
            )
        if self.strategy != "central" and self.parameter_devices > 1:
            raise ValueError(
                f"--parameter-devices {self.parameter_devices}: with "
                f"{self.strategy}, each device has all variables. Choose "
                "--strategy central."
            )
        if not self.is_sharded:
            return
        if self.strategy in ("one-device", "central"):
            raise ValueError(
                "--optimizer-state sharded: each replica of mirrored and "
                f"multi-worker keeps a part. Received: --strategy "
                f"{self.strategy}, which has one copy."
            )
        if (optimizer or "").lower() in _NEED_WHOLE_VARIABLES:
            raise ValueError(
                "--optimizer-state sharded: the update of "
                f"{optimizer} takes whole variables, not parts. Choose "
                "another optimizer, or --optimizer-state mirrored."
            )

    @property
    def placement(self) -> Placement:
        """The `Placement` of the chosen strategy."""
        return self.placements[self.title]

    @property
    def title(self) -> str:
        """The key of the chosen strategy in `placements`."""
        if self.strategy in ("one-device", "central"):
            return self.strategy.replace("-", " ")
        return SHARDED if self.is_sharded else "mirrored"

    @property
    def num_devices(self) -> int:
        """The number of devices that compute on each worker."""
        return self.devices or (1 if self.strategy == "one-device" else 8)

    @property
    def placements(self) -> dict[str, Placement]:
        """All placements on as many devices, by name."""
        workers = self.workers or (2 if self.strategy == "multi-worker" else 1)
        devices = tuple(f"device {i}" for i in range(self.num_devices))
        keepers: tuple[str, ...] = ("parameter device",)
        if self.parameter_devices > 1:
            count = self.parameter_devices
            keepers = tuple(f"parameter device {i}" for i in range(count))
        known = {
            "one device": Placement(devices[:1]),
            "mirrored": Placement(devices, (), workers),
            SHARDED: Placement(devices, (), workers, is_sharded=True),
        }
        if workers == 1:
            known["central"] = Placement(devices, keepers)
        return known
