"""Devices of JAX, and executors on them."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_dist.backend import Backend
from keras_dist.backend import Executor
from keras_dist.compilation import Compiler
from keras_dist.device import Device
from keras_dist.errors import DeviceError
from keras_dist.errors import VirtualDevicesError
from keras_dist.launch.bench.loops import BenchmarksLoops
from keras_dist.launch.bench.loops import Loop
from keras_dist.launch.bench.loops import Setting
from keras_dist.plan import Plan
from keras_dist.training.differentiation import Differentiated
from keras_dist.training.differentiation import Differentiates
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.compiler import JaxCompiler
from keras_dist_jax.devices import jax_devices
from keras_dist_jax.differentiation import differentiate
from keras_dist_jax.executor import JaxExecutor
from keras_dist_jax.gate import Gate
from keras_dist_jax.gate import OneAtATime
from keras_dist_jax.gate import OpenGate
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import MeshLayout
from keras_dist_jax.layout import SingleLayout


class JaxBackend(Backend, Differentiates, BenchmarksLoops):
    """JAX: the devices of its default platform, and the CPU's."""

    def __init__(self) -> None:
        self._cpu_gate = OneAtATime()
        self._plain_compiler = JaxCompiler(None, OpenGate())
        internals.install_loss_scaling()

    def list_devices(self) -> Sequence[Device]:
        return list(jax_devices())

    def set_virtual_devices(self, num_devices: int, device_type: str) -> None:
        try:
            jax.config.update("jax_num_cpu_devices", num_devices)
        except RuntimeError as error:  # JAX has started
            existing = len(jax.local_devices(backend="cpu"))
            if existing == num_devices:
                return
            raise VirtualDevicesError(
                f"set_virtual_devices came after JAX had started. Received: "
                f"num_devices={num_devices}. Expected: {existing}, the number "
                "of CPU devices that there are. Call it before anything uses "
                "a device, right after the imports, or set the environment "
                "variable KERAS_DIST_VIRTUAL_DEVICES."
            ) from error

    def executor(self, plan: Plan) -> Executor:
        layout = layout_of(plan)
        gate: Gate = self._cpu_gate if layout.one_at_a_time else OpenGate()
        return JaxExecutor(plan, layout, gate)

    def compiler(self) -> Compiler:
        return self._plain_compiler

    def print(
        self, values: Sequence[Any], sep: str, end: str, replica: Any
    ) -> None:
        leaves, structure = jax.tree.flatten((list(values), replica))
        traced = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]
        if not any(traced):
            super().print(values, sep, end, replica)
            return

        def show(*computed: Any) -> None:
            rest = iter(computed)
            values, replica = structure.unflatten(
                [
                    next(rest) if is_traced else leaf
                    for leaf, is_traced in zip(leaves, traced, strict=True)
                ]
            )
            Backend.print(self, values, sep, end, replica)

        jax.debug.callback(
            show,
            *[
                leaf
                for leaf, is_traced in zip(leaves, traced, strict=True)
                if is_traced
            ],
        )

    def differentiate(
        self,
        fn: Callable[..., tuple[Any, Any]],
        variables: Sequence[keras.Variable],
        tensors: Sequence[Any],
    ) -> Differentiated:
        return differentiate(fn, variables, tensors)

    @property
    def native_loop_text(self) -> str:
        from keras_dist_jax import bench

        return bench.NATIVE_LOOP_TEXT

    def native_loop(self, setting: Setting) -> Loop:
        from keras_dist_jax import bench

        return bench.native_loop(setting)

    def other_loops(self, setting: Setting) -> dict[str, Loop]:
        from keras_dist_jax import bench

        return bench.other_loops(setting)


def layout_of(plan: Plan) -> Layout:
    """The plan's devices as JAX sees them.

    Raises:
        DeviceError: If the replicas are on devices of different types.
    """
    known = jax_devices()
    if plan.num_replicas == 1:
        return SingleLayout(known[plan.primary])
    if len({device.type for device in plan.devices}) > 1:
        names = ", ".join(str(device) for device in plan.devices)
        raise DeviceError(
            "The replicas of a strategy run one program together on JAX, and "
            f"need devices of one type. Received: {names}. Expected: all "
            "'cpu', all 'gpu' or all 'tpu'."
        )
    return MeshLayout([known[device] for device in plan.devices])
