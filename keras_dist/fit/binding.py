"""Binds a model to a strategy by attributes of the instance only."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.errors import StrategyMismatchError
from keras_dist.fit import own_code
from keras_dist.fit.banner import introduce
from keras_dist.fit.banner import rows_of_a_batch
from keras_dist.fit.plain_models import DistributedConfig
from keras_dist.fit.plain_models import forget
from keras_dist.fit.profile import stop_profiles_of
from keras_dist.fit.steps import Steps
from keras_dist.fit.steps import prepare_steps
from keras_dist.fit.workers import chief_saves
from keras_dist.fit.workers import fingerprint
from keras_dist.fit.workers import loops
from keras_dist.fit.workers import sync
from keras_dist.fit.workers.agreement import Facts
from keras_dist.fit.workers.backup import refuse_shards
from keras_dist.fit.workers.entry import Entry
from keras_dist.fit.workers.entry import check_batch
from keras_dist.fit.workers.entry import why_all_in
from keras_dist.inputs.dataset import data_for_fit
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_saveables
from keras_dist.internals.keras_random import is_seed
from keras_dist.plugin.capabilities import check_state_shards
from keras_dist.plugin.chief_only import check_all_come
from keras_dist.plugin.front_end import BOUND
from keras_dist.plugin.recorder import of_its_own
from keras_dist.plugin.runner import StepRunner
from keras_dist.plugin.workers import raise_explained
from keras_dist.replica.adoption import adopt
from keras_dist.replica.adoption import check_owner
from keras_dist.replica.state import current_call
from keras_dist.replica.strategy_core import StrategyBase

_ENTRY_POINTS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)


def claim_variable(variable: keras.Variable, strategy: StrategyBase) -> None:
    """Makes `strategy` the owner of a variable and places its value."""
    claim_variables([variable], strategy)


def claim_variables(
    variables: Sequence[keras.Variable], strategy: StrategyBase
) -> None:
    """Makes `strategy` the owner of variables and places their values."""
    for variable in variables:
        check_owner(variable, strategy)
        if "distribute_strategy" not in vars(variable):
            _check_layout(variable, strategy)
            variable.distribute_strategy = strategy
            # Keras' own seed generator lives as long as the process.
            if not is_seed(variable):
                strategy.executor.hooks.stay_with(variable)
            if not strategy.plan.is_one_device:
                adopt(variable)
    workers = strategy.executor.workers
    if workers is not None:
        # Before variables are in parts, which have no value here.
        sync.take_chiefs_values(sync.not_taken(variables), workers)
    for variable in variables:
        strategy.executor.storage(variable).place()


def _check_layout(variable: keras.Variable, strategy: StrategyBase) -> None:
    """Refuses a variable with a layout from `keras.distribution`."""
    layout = keras_internals.layout_of(variable)
    if layout is not None:
        raise StrategyMismatchError(
            f"Variable '{variable.path}' has a layout of "
            f"`keras.distribution`, but {strategy!r} decides where its "
            f"variables are.\nReceived: layout={layout!r}. Expected: a "
            "variable without a layout. Make the variable, or the model, "
            "while no distribution is set."
        )


def bind_model(model: keras.Model, strategy: StrategyBase) -> "Binding":
    """Binds a model to a strategy, once."""
    binding: Binding | None = model.__dict__.get(BOUND)
    if binding is None:
        keras_internals.refuse_nnx_mode()
        binding = Binding(model, strategy)
        binding.replace_methods()
    elif binding.strategy is not strategy:
        raise StrategyMismatchError(
            f"Model '{model.name}' belongs to {binding.strategy!r} and can't "
            f"join {strategy!r}. Make a new model under the scope of that "
            "strategy, for instance with `keras.models.clone_model(model)`."
        )
    return binding


class _Entered(threading.local):
    def __init__(self) -> None:
        self.already = False


class Binding:
    """The link between a model and its strategy."""

    def __init__(self, model: keras.Model, strategy: StrategyBase) -> None:
        self._model = weakref.ref(model)
        self.strategy = strategy
        self._claimed_for: object | None = None
        self._steps: Steps | None = None
        # What workers compare: what the model was compiled with, its layers,
        # and the stamp of the layers that they have compared.
        self.compiled: Facts | None = None
        self.layers: Facts = {}
        self.compared: Any = None
        # Variables of others that the model's code reads.
        self.outside: list[keras.Variable] = []
        self._entered = _Entered()

    @property
    def model(self) -> keras.Model:
        """The model, which holds this binding and so is alive."""
        model = self._model()
        assert model is not None
        return model

    def replace_methods(self) -> None:
        """Sets the instance attributes that distribute the model."""
        model, executor = self.model, self.strategy.executor
        # `setattr` would have Keras and torch track these attributes.
        replacements: dict[str, Any] = {
            BOUND: self,
            "compile": self._compile,
            "_symbolic_build": self._symbolic_build,
        }
        if not self.strategy.plan.is_one_device:
            replacements["get_config"] = self._description()
        for name in _ENTRY_POINTS:
            replacements[name] = self._entry_point(name)
        # A layer with a trainer mixed in has no methods for saving.
        is_saved = isinstance(model, keras.Model)
        if is_saved and executor.workers is not None:
            for name in chief_saves.METHODS:
                replacements[name] = chief_saves.method_of(model, name)
        if isinstance(executor, StepRunner):
            self._steps = Steps(model, executor, self.strategy)
            self._steps.replace()
        replacements |= executor.bind(model)
        for name, value in replacements.items():
            object.__setattr__(model, name, value)
        executor.hooks.stay_with(model)
        forget(model)

    def claim(self) -> None:
        """Claims the model's and its optimizers' variables for the strategy."""
        variables = keras_saveables.all_variables(self.model)
        claim_variables(variables, self.strategy)

    def _new_variables(self) -> list[keras.Variable]:
        """Returns variables that the model got since it was claimed."""
        return [
            variable
            for variable in keras_saveables.all_variables(self.model)
            if vars(variable).get("distribute_strategy") is not self.strategy
        ]

    def prepare(self) -> None:
        """Claims the variables that the model has now, for its next step."""
        self.claim()
        self._prepare(is_new=True)

    def _prepare(self, is_new: bool) -> None:
        executor = self.strategy.executor
        if self._steps is not None:
            self._steps.replace()
            prepare_steps(self.model, is_new)
        executor.prepare(self.model)

    def _share_out(self) -> None:
        """Divides what `fit` has combined among components again."""
        for variable in keras_saveables.all_variables(self.model):
            if id(variable) in self.strategy.has_components:
                variable.share_out()

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        self._claimed_for = None
        with self.strategy.scope():
            type(self.model).compile(self.model, *args, **kwargs)
        if self._steps is not None and self._entered.already:
            self._steps.must_build = True
        if self.strategy.executor.workers is not None:
            self.compiled = fingerprint.of_compile(self.model)
        if self.strategy.plan.shards_optimizer:
            for optimizer in keras_saveables.all_optimizers(
                self.model
            ).values():
                check_state_shards(optimizer)

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        model = self.model
        build = functools.partial(type(model)._symbolic_build, model)
        if keras_internals.is_wholly_built(model):
            build(*args, **kwargs)  # makes nothing
            claim_variables(self._new_variables(), self.strategy)
            return
        with self.strategy.scope():
            build(*args, **kwargs)
        self.prepare()

    def _description(self) -> Callable[..., DistributedConfig]:
        original = type(self.model).get_config

        @functools.wraps(original)
        def get_config(*args: Any, **kwargs: Any) -> DistributedConfig:
            config = original(self.model, *args, **kwargs)
            return DistributedConfig(config, self.strategy)

        return get_config

    def _entry_point(self, name: str) -> Callable[..., Any]:
        each_batch = name.endswith("_on_batch")

        @of_its_own("`fit` or a relative")
        def entry_point(*args: Any, **kwargs: Any) -> Any:
            model = self.model
            if current_call() is not None:
                raise RuntimeError(
                    f"`{name}` of model '{model.name}' was called in a "
                    "function that `strategy.run` calls on each replica.\nBut "
                    f"`{name}` itself divides batches over the replicas. Call "
                    f"`{name}` outside of `run`. Inside, call the model "
                    "itself."
                )
            context.check_same(
                self.strategy, f"`{name}` of model '{model.name}'"
            )
            if self.strategy.executor.workers is not None:
                check_all_come(f"`{name}` of model '{model.name}'")
            self.strategy.has_run = True
            if not each_batch:
                convert = functools.partial(
                    data_for_fit, self.strategy, own_rows=self._loads_own_rows
                )
                args = tuple(map(convert, args))
                kwargs = {k: convert(v) for k, v in kwargs.items()}
            method = getattr(type(model), name)
            call: Callable[[], Any] = functools.partial(
                method, model, *args, **kwargs
            )
            if self._steps is not None and not self._entered.already:
                own_code.tell(self.strategy, model)
            agree = None
            executor = self.strategy.executor
            workers = executor.workers
            if workers is None and name == "fit":
                refuse_shards(model, kwargs.get("callbacks"))
            if workers is not None and not each_batch:
                entry = Entry(name, model, executor, args, kwargs)
                call, agree = entry.run, entry.agree
            elif workers is not None:
                agree = functools.partial(
                    check_batch, method, (model, *args), kwargs, workers
                )
            rows = functools.partial(rows_of_a_batch, method, args, kwargs)
            with self._running(each_batch, agree, rows):
                if name == "fit":
                    introduce(self.strategy, model, method, args, kwargs)
                return call()

        entry_point.__name__ = name
        entry_point.__doc__ = getattr(type(self.model), name).__doc__
        return entry_point

    @property
    def _loads_own_rows(self) -> bool:
        executor = self.strategy.executor
        if executor.workers is None:
            return False
        return not why_all_in(self.model, executor)

    @contextlib.contextmanager
    def _running(
        self,
        each_batch: bool,
        agree: Callable[[], None] | None,
        rows: Callable[[], int],
    ) -> Iterator[None]:
        model, executor = self.model, self.strategy.executor
        if self._entered.already:  # `fit` runs `evaluate`
            yield
            return
        self._entered.already = True
        try:
            # Methods for one batch claim variables once, and again only after
            # `compile` has changed the optimizer.
            optimizer = getattr(model, "optimizer", self)
            is_new = not each_batch or self._claimed_for is not optimizer
            if agree is not None and is_new:
                agree()
            with executor.hooks, executor.execution_scope():
                if is_new:
                    context.check_no_distribution(
                        self.strategy, f"model '{model.name}'"
                    )
                    self.claim()
                    self._claimed_for = optimizer
                self._prepare(is_new)
                if executor.workers is not None and not each_batch:
                    variables = keras_saveables.all_variables(model)
                    sync.take_chiefs_values(variables, executor.workers)
                    for variable in variables:
                        executor.workers.assigned.pop(id(variable), None)
                with loops.in_run(executor.workers):
                    yield
        except BaseException as error:
            executor.recover(model)
            explained = executor.explained(error)
            if self._steps is not None:
                explained = self._steps.explained(explained, rows)
            if explained is not error:
                raise explained from error
            raise_explained(error, executor.workers)
            raise
        finally:
            self._entered.already = False
            executor.release(model)
            stop_profiles_of(model)
            if self.strategy.has_components:
                self._share_out()
