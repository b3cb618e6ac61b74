"""`Accelerator`: Accelerate's own, whose processes are the workers of a fleet."""

from __future__ import annotations

import inspect
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DynamoBackend, parse_flag_from_env

from paceline.adapters.accelerate import fleet_values
from paceline.adapters.accelerate.joined import JoinedFleet
from paceline.adapters.accelerate.loader import EvaluationBatch, FleetLoader
from paceline.adapters.accelerate.refusals import (
    NotCopied,
    check_parameters,
    check_settings,
    check_state_made_before,
    without_mesh,
)
from paceline.adapters.accelerate.updates import (
    FleetOptimizer,
    FleetScheduler,
    StepUpdates,
    keep_gradients,
    refuse_no_sync,
)
from paceline.errors import MisuseError
from paceline.fleet import Fleet
from paceline.renamed import names_present_keywords
from paceline.settings import whole_number
from paceline.step.step import Step
from paceline.training.join import as_if_alone

CHECKPOINT = "paceline.pt"
"""File of `Accelerator.save_state`, from which a fleet of any size resumes."""


class LeadersTrackers(accelerate.Accelerator):
    """An Accelerator whose trackers start where they are first needed: on the worker that leads, which may change."""

    _asked_trackers: tuple[Any, Any] | None = None
    """Arguments of `init_trackers`."""

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Start all trackers on the main process; a worker that becomes it later starts its own."""
        self._asked_trackers = args, kwargs
        self._start_trackers()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log values to all trackers, on the main process."""
        self._start_trackers()
        super().log(*args, **kwargs)

    def get_tracker(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tracker by its name, on the main process."""
        self._start_trackers()
        return super().get_tracker(*args, **kwargs)

    def _start_trackers(self) -> None:
        if self._asked_trackers is not None and self.is_main_process and not self.trackers:
            args, kwargs = self._asked_trackers
            super().init_trackers(*args, **kwargs)


class Accelerator(NotCopied, LeadersTrackers):
    """Accelerate's Accelerator on a fleet of unlike machines: the script stays as it is.

    An update has ``batch_size`` samples times processes times ``gradient_accumulation_steps``, however they are shared:
    it equals that of one process with all of them. Micro-batches have at most ``batch_size`` samples.

    Args:
        *others: Accelerate's own arguments.
        pace: decides each worker's samples per update, as in `paceline.join`; by default adaptive, with at least one
            sample per worker. A pace with deadlines is refused.
        combine: "gradients"; averages of parameters need a loop over ``fleet.steps``.
        device: device of this worker; by default a GPU of its own where there is one.
        seed: seed of the shuffle and of random numbers in the loop; by default torch's, as ``set_seed`` sets it, and 0
            where workers come and go.
        nonfinite: "stop" or "skip" the update when gradients are NaN or infinite.
        comm_dtype: number format in which gradients are sent over the network: "float32", "bf16" or "fp16".
        name: name of the run, for its folder and log.
        run_dir: the run's folder.
        quiet: if True, print no live view and no closing verdict.
        global_batch: samples per update, over the whole fleet; required where workers come and go.
        micro_batch: samples that go through the model at once; "auto" finds a size on each worker.
        **more: Accelerate's own arguments, by name.
    """

    instead = "hand over accelerator.device or .process_index, or call Accelerator() where it is needed"
    data_parallel_rank = without_mesh("data_parallel_rank")
    data_parallel_shard_rank = without_mesh("data_parallel_shard_rank")
    tensor_parallel_rank = without_mesh("tensor_parallel_rank")
    pipeline_parallel_rank = without_mesh("pipeline_parallel_rank")
    context_parallel_rank = without_mesh("context_parallel_rank")

    @names_present_keywords
    def __init__(
        self,
        *others: Any,
        pace: Any = None,
        combine: Any = "gradients",
        device: str | torch.device | None = None,
        seed: int | None = None,
        nonfinite: str = "stop",
        comm_dtype: str = "float32",
        name: str | None = None,
        run_dir: str | Path | None = None,
        quiet: bool = False,
        global_batch: int | None = None,
        micro_batch: int | str | None = None,
        **more: Any,
    ) -> None:
        bound = inspect.signature(accelerate.Accelerator.__init__).bind(self, *others, **more)
        check_settings(bound.arguments)
        self.global_batch = None if global_batch is None else whole_number("global_batch", global_batch)
        self.micro_batch = micro_batch
        cpu = bound.arguments.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU")
        asked = {
            "pace": pace,
            "combine": combine,
            "device": "cpu" if cpu and device is None else device,
            "seed": seed,
            "nonfinite": nonfinite,
            "comm_dtype": comm_dtype,
            "name": name,
            "run_dir": run_dir,
            "quiet": quiet,
        }
        current = JoinedFleet.current
        if current is None or current.left:
            self.joined = JoinedFleet(asked)
        else:
            self.joined = current
            current.check_asked({**asked, "device": device})
        try:
            elastic = self.joined.context.elastic is not None
            check_state_made_before(None if elastic else self.joined.fleet.world_size)
            with as_if_alone(ACCELERATE_TORCH_DEVICE=str(self.joined.fleet.device)):
                super().__init__(*others, **more)
        except BaseException as error:
            self.joined.leave(error)
            raise
        self.updates = StepUpdates(lambda: self._optimizers)
        self.updates.show(True)
        self.evaluation: EvaluationBatch | None = None
        """This worker's batch of the evaluation under way; the adapter's own."""
        self.all_workers = fleet_values.AllWorkers(
            self.joined, self.updates, lambda: self.evaluation is not None and self.evaluation.alone
        )
        self.flag_tensor: torch.Tensor | None = None
        self._trained: FleetLoader | None = None
        self._resumed: str | None = None
        """After `load_state`, where the checkpoint was saved: "inside" a loop over a loader or "behind" it."""
        self.joined.belong_to(self)
        fleet_values.serve(JoinedFleet.current_accelerator)

    @property
    def fleet(self) -> Fleet:
        """The fleet that this worker is in."""
        return self.joined.fleet

    @property
    def last_step(self) -> Step | None:
        """The last update, whose ``loss`` is the fleet's mean; None before the first."""
        return self.updates.last

    @property
    def trains(self) -> bool:
        """Whether a loop over a prepared loader trains: with an optimizer, gradients, and a model in training mode."""
        models = self.joined.context.models
        return bool(self._optimizers) and torch.is_grad_enabled() and any(model.training for model in models)

    def check_no_gradients(self) -> None:
        """Raise MisuseError for gradients in a loop that cannot train, for want of an optimizer; the adapter's own."""
        if self._optimizers:
            return
        if any(parameter.grad is not None for model in self.joined.context.models for parameter in model.parameters()):
            raise MisuseError(
                "a training loop without a prepared optimizer: write model, optimizer, loader = "
                "accelerator.prepare(model, optimizer, loader)"
            )

    @property
    def compiles(self) -> bool:
        """Whether prepared models are compiled."""
        return bool(self.state.dynamo_plugin.backend != DynamoBackend.NO)

    # -- preparing -----------------------------------------------------------------------------------------------------

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Return the model on the worker's device, with the leader's weights on every worker."""
        if getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        joined = self.joined
        if joined.context.steps is not None and not self._models:
            self.updates.forget()
            joined.renew()
        frozen = evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters())
        if joined.context.steps is not None and not frozen:
            raise MisuseError(
                "accelerator.prepare(model) after a training loop: prepare every model before the first loop, also one "
                "that is trained later; for a training of its own call accelerator.free_memory() and prepare all anew"
            )
        if frozen:
            model.to(joined.fleet.device)
            if next(model.parameters(), None) is not None:
                joined.track("frozen", model)
        else:
            joined.fleet.model(model)
            keep_gradients(model, self._may_clear)
            refuse_no_sync(model)
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def _may_clear(self, model: torch.nn.Module) -> bool:
        """Return whether ``model.zero_grad()`` acts: a prepared model's gradients are cleared by the update."""
        prepared = model in self.joined.context.models
        if prepared:
            self.updates.cleared(model.parameters())
        return self.updates.step is None or not prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader of the fleet's micro-batches, and of an evaluation's batches."""
        if isinstance(data_loader, FleetLoader):
            return data_loader
        prepared = FleetLoader(self, data_loader)
        self._dataloaders.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """Return an optimizer that acts at the last micro-batch of an update."""
        prepared = optimizer if isinstance(optimizer, FleetOptimizer) else FleetOptimizer(optimizer, self.updates)
        if not any(prepared is known for known in self._optimizers):
            self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that advances with the updates."""
        if isinstance(scheduler, FleetScheduler):
            return scheduler

        def optimizers() -> list[FleetOptimizer]:
            own = [one for one in self._optimizers if scheduler.optimizer in (one, one.optimizer)]
            return own or self._optimizers

        prepared = FleetScheduler(
            scheduler,
            optimizers,
            self.updates,
            with_optimizer=self.step_scheduler_with_optimizer,
            batches=lambda: 1 if self._trained is None else self._trained.processes,
            warn=self.joined.context.warn,
        )
        self._schedulers.append(prepared)
        return prepared

    def before_training(self, loader: FleetLoader) -> None:
        """Bring everything that was prepared to the fleet, before a training loop; the adapter's own."""
        self._trained = loader
        check_parameters([one.optimizer for one in self._optimizers], self.joined.context.models)
        self._track()
        self.joined.take_seed(self.dataloader_config.data_seed)
        self._resumed = None

    def _track(self) -> None:
        for optimizer in self._optimizers:
            self.joined.track("optimizer", optimizer)
        for scheduler in self._schedulers:
            self.joined.track("scheduler", scheduler.scheduler)
        for thing in self._custom_objects:
            self.joined.track("custom", thing)
        if self.scaler is not None:
            self.joined.track("scaler", self.scaler)

    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared; another training may follow."""
        self.updates.forget()
        released = super().free_memory(*objects)
        self._custom_objects.clear()
        self._trained = None
        return released

    # -- training ------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradient of a micro-batch's mean loss; how much it counts is read from its graph."""
        self.updates.backward(loss, **kwargs)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Do nothing: micro-batches accumulate until the update anyway."""
        yield

    @contextmanager
    def no_sync(self, model: Any = None) -> Iterator[None]:
        """Do nothing: gradients travel once per update."""
        yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Set ``even_batches`` of all prepared loaders meanwhile; shares of training are unequal anyway."""
        before = [(loader, loader.even_batches) for loader in self._dataloaders if even_batches is not None]
        if any(isinstance(loader.dataset, torch.utils.data.IterableDataset) for loader, _ in before):
            warnings.warn(
                "even_batches is only supported for map-style datasets, and a loader has a stream", stacklevel=3
            )
        for loader, _ in before:
            loader.even_batches = even_batches
        try:
            yield
        finally:
            for loader, even in before:
                loader.even_batches = even

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Run the round, at the last micro-batch: its mean gradient is unscaled."""
        if self.updates.open and self.updates.sync:
            self.updates.combine()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Run the round and clip the fleet's mean gradient, at the last micro-batch; return its norm, before 0."""
        owned = _listed(parameters)
        norm = self.updates.clip(lambda: torch.nn.utils.clip_grad_norm_(owned, max_norm, norm_type=norm_type))
        return torch.zeros((), device=self.device) if norm is None else norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Run the round and clip the fleet's mean gradient, at the last micro-batch; nothing before."""
        owned = _listed(parameters)
        self.updates.clip(lambda: torch.nn.utils.clip_grad_value_(owned, clip_value))

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Raise ValueError: the optimizer would update before the fleet has combined."""
        raise ValueError("LOMO updates while backward runs, before the fleet has combined: use another optimizer")

    # -- together ------------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return all workers' tensors, one below the other; their numbers of rows may differ."""
        parts = self.all_workers.leaves("accelerator.gather()", tensor)
        return fleet_values.rebuilt(tensor, [fleet_values.joined_rows("accelerator.gather()", part) for part in parts])

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return all workers' rows of a batch, each sample that counts once; plain values in a list."""
        batch = self.evaluation

        def own(rows: Any) -> Any:
            if isinstance(rows, torch.Tensor) and rows.dim() == 0:
                rows = rows[None]
            if not self.updates.counts:
                return rows[:0]
            if batch is None or batch.alone or (batch.rows and len(rows) != batch.batch_size):
                return rows
            return rows[: batch.rows]

        try:
            fleet_values.leaves_of(input_data)
        except TypeError:
            use_gather_object = True
        if not use_gather_object:
            return self.gather(fleet_values.each_leaf(input_data, own))
        listed = own(input_data) if isinstance(input_data, list) else input_data if self.updates.counts else []
        parts = self.all_workers.objects("accelerator.gather_for_metrics()", listed)
        return [one for part in parts for one in part]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or maximum of all workers' tensors."""
        if reduction == "none":
            return tensor
        parts = self.all_workers.leaves("accelerator.reduce()", tensor)
        return fleet_values.rebuilt(
            tensor, [fleet_values.reduced("accelerator.reduce()", part, reduction) for part in parts]
        )

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return the tensors padded along ``dim`` to the longest of all workers."""
        parts = self.all_workers.leaves("accelerator.pad_across_processes()", tensor)
        own = fleet_values.leaves_of(tensor)
        longest = [max((p.shape[dim] for p in part if p.dim() > dim), default=0) for part in parts]
        sized = zip(own, longest, strict=True)
        filled = [
            fleet_values.padded(one, size, dim=dim, value=pad_index, first=pad_first) if one.dim() > dim else one
            for one, size in sized
        ]
        return fleet_values.rebuilt(tensor, filled)

    def check_trigger(self) -> bool:
        """Return whether any worker has called `set_trigger`; in an update it is asked at the last micro-batch."""
        if self.updates.open and not self.updates.sync:
            return False
        mine = self.flag_tensor is not None and bool(self.flag_tensor.item())
        if not self.fleet.any(mine):
            return False
        self.flag_tensor = torch.tensor(0, device=self.device)
        return True

    def wait_for_everyone(self) -> None:
        """Wait until all workers come here."""
        self.updates.check_everybody_comes("accelerator.wait_for_everyone()")
        context = self.joined.context
        if not (self.joined.left or context.outside):
            with context.meet("accelerator.wait_for_everyone()"):
                context.transport.gather("accelerator.wait_for_everyone()", None)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the leader go through the block before the others."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the leader go through the block before the others."""
        with self.main_process_first():
            yield

    def end_training(self) -> None:
        """Finish the trackers and leave the fleet; the end of the script leaves it, too."""
        for tracker in self.trackers:
            tracker.finish()
        self.joined.leave()
        self.state.destroy_process_group()

    # -- state ---------------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Write models, optimizers, schedulers, registered objects and the position in the data to a folder.

        The leader writes, between updates. Where workers come and go, all of them call it. A fleet of any size resumes
        from it.
        """
        self.updates.check_everybody_comes("accelerator.save_state()")
        if self.updates.open:
            raise MisuseError("accelerator.save_state before optimizer.step() of the update: call it after")
        naming = self.project_configuration
        folder = self._next_folder() if naming.automatic_checkpoint_naming else Path(output_dir).expanduser()
        if self.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        weights = [self.get_state_dict(model, unwrap=False) for model in self._models]
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, weights, str(folder))
        self._track()
        steps = self.joined.context.steps
        extra: dict[str, Any] = {}
        if steps is not None:
            extra = {"loop": steps.script_loop.number + steps.finished, "over": steps.finished}
        if self._trained is not None and self._trained in self._dataloaders:
            # In words: a number here would be taken for one from which the script counts its loops.
            extra["batches"] = f"loader {self._dataloaders.index(self._trained)}, {self._trained.global_batch}"
        elastic = self.joined.context.elastic is not None
        (self.fleet.save if elastic else self.fleet._save_on_leader)(folder / CHECKPOINT, extra=extra)
        naming.iteration += 1
        return str(folder)

    def _next_folder(self) -> Path:
        """Return the next folder by `ProjectConfiguration`, and remove the oldest ones beyond its limit."""
        naming, folder = self.project_configuration, Path(self.project_dir) / "checkpoints"
        old = _numbered(folder) if self.is_main_process and self.joined.context.elastic is not None else []
        if old:  # a worker that has returned has not counted them
            naming.iteration = max(naming.iteration, _number(old[-1]) + 1)
        new = folder / f"checkpoint_{self.save_iteration}"
        if self.is_main_process:
            if new.exists():
                raise ValueError(f"{new} exists already: set accelerator.project_configuration.iteration")
            old = _numbered(folder)
            if naming.total_limit is not None:
                for one in old[: max(0, len(old) + 1 - naming.total_limit)]:
                    shutil.rmtree(one)
        return new

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Resume from a folder of `save_state`, with any number of workers; the next training loop goes on there."""
        if input_dir is None:
            if not self.project_configuration.automatic_checkpoint_naming:
                raise ValueError("accelerator.load_state needs the folder, without automatic_checkpoint_naming")
            folder = (_numbered(Path(self.project_dir) / "checkpoints") or [Path(self.project_dir)])[-1]
        else:
            folder = Path(input_dir).expanduser()
        for hook in self._load_model_state_pre_hook.values():
            hook(list(self._models), str(folder))
        self._track()
        try:
            extra = self.fleet.load(folder / CHECKPOINT, loops="rest")
        except ValueError as error:
            raise ValueError(
                f"{error}; {CHECKPOINT} is written by save_state of paceline.adapters.accelerate: of Accelerate's own "
                "folders load the weights, and train anew"
            ) from None
        self._resumed = "behind" if (extra or {}).get("over") else "inside"
        batches = (extra or {}).get("batches") or f"loader {len(self._dataloaders)}, 0"
        number, saved = map(int, batches.removeprefix("loader ").split(", "))
        now = self._dataloaders[number].global_batch if number < len(self._dataloaders) else saved
        if now != saved:
            self.joined.context.warn(
                f"{folder} was saved with {saved} samples per update, and now an update has {now}, so a number of "
                f"updates, or len(loader), means other samples: write Accelerator(global_batch={saved})"
            )

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader without its first batches.

        A training goes on where `load_state` has set it, which knows the samples that are done: the number is not used.
        """
        if not isinstance(dataloader, FleetLoader):
            return super().skip_first_batches(dataloader, num_batches)
        return dataloader.skipping(num_batches) if num_batches else dataloader

    def goes_on(self, skipped: int) -> bool:
        """Return whether a training loop without its first batches has any left; the adapter's own."""
        if self._resumed is None:
            raise MisuseError(
                f"skip_first_batches(loader, {skipped}) without load_state: the fleet's checkpoint knows which samples "
                "are done; call accelerator.load_state before"
            )
        inside, self._resumed = self._resumed == "inside", None
        return inside


def _listed(parameters: Any) -> list[torch.Tensor]:
    """Return parameters that may be one tensor, as torch's clipping takes them."""
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _numbered(folder: Path) -> list[Path]:
    """Return the folders with a number at the end of their name, by number."""
    found = [one for one in folder.glob("*") if one.name[-1].isdigit()] if folder.is_dir() else []
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    return int(re.findall(r"\d+$", folder.name)[0])
