"""Checkpoints: written beside the training, whole or not at all, and never trusted without a look."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from hermes_jax.learner import manifest


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written or read: which, why, what is still good, what to do."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Args:
        step: training step after which it was saved.
        state: arrays, in the structure and sharding that was asked for.
        host: the host's state as it was saved (prompt cursor, pending groups, config, policy version, ...).
        skipped: one line for each newer checkpoint that is not whole and was passed over.
    """

    step: int
    state: Any
    host: dict[str, Any]
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class _Writing:
    step: int
    metric: float | None
    leaves: Mapping[str, jax.ShapeDtypeStruct]
    on_host: bool


class Checkpoints:
    """The checkpoints of one run: `directory/<step>/` each.

    A step gets its name only when all its bytes and their checksums are on the disk; older ones are removed after that.
    There is one writer per directory; readers (`read_only=True`) may look at any time. `save` and `restore` call jax:
    they belong on the thread that owns the state. `wait` may block for as long as the disk takes.

    Args:
        directory: made if it is missing.
        keep_last: newest checkpoints kept.
        keep_best: checkpoints with the highest metric kept besides.
        asynchronous: `save` returns while the writing goes on in the background.
        copies: `save` copies arrays that lie in the host's memory, and the caller may donate them at once. False = it
            must call `wait_for_arrays` first, and no memory is taken.
        read_only: never writes or removes anything.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 2,
        keep_best: int = 0,
        asynchronous: bool = True,
        copies: bool = True,
        read_only: bool = False,
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last must be >= 1 and keep_best >= 0, got {keep_last} and {keep_best}")
        self.directory = Path(directory).resolve()
        self._keep = keep_last, keep_best
        self._asynchronous, self._copies = asynchronous, copies
        self._read_only = read_only
        self._writing: _Writing | None = None
        self._whole: set[int] = set()
        self._manager: ocp.CheckpointManager | None = None

    # -- writing ---------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, host: Mapping[str, Any], *, metric: float | None = None) -> None:
        """Saves one step. With `copies`, the caller may donate the arrays at once.

        A damaged checkpoint of the same step is replaced.

        Args:
            step: training step after which the state is saved.
            state: tree of arrays.
            host: anything that JSON can hold without change (texts as keys, lists instead of tuples).
            metric: ranks the checkpoint among the best; None or NaN = not ranked.

        Raises:
            CheckpointError: the step exists and is whole, `host` is no JSON, or this or the save before failed.
        """
        if self._read_only:
            raise CheckpointError(f"the checkpoints in {self.directory} were opened read-only: nothing can be saved")
        _require_json(host)
        self.wait()
        self._make_room(step)
        taken = _copied if self._asynchronous and self._copies else jnp.asarray
        leaves = {name: taken(leaf) for name, leaf in named_leaves(state).items()}
        metric = None if metric is None or math.isnan(metric) else float(metric)
        shapes, on_host = {name: _abstract(leaf) for name, leaf in leaves.items()}, any(map(_on_host, leaves.values()))
        self._writing = _Writing(step, metric, shapes, on_host)
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(leaves), host=ocp.args.JsonSave(dict(host)))
        try:
            self._open().save(step, args=arguments, force=True)
        except Exception as error:
            raise self._failed(error) from error
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is whole on the disk.

        Raises:
            CheckpointError: it failed; what was saved before is intact.
        """
        if self._manager is None or self._writing is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._writing = None

    def wait_for_arrays(self) -> None:
        """Returns when the arrays of the last save may be donated; elsewhere than on the CPU that is at once.

        Raises:
            CheckpointError: as `wait`.
        """
        if self._writing is not None and not self._copies and self._writing.on_host:
            self.wait()

    def discard_after(self, step: int) -> None:
        """Removes every checkpoint newer than `step`, for a run that goes on from an older one."""
        self.wait()
        for newer in manifest.steps(self.directory):
            if newer > step:
                self._remove(newer)

    def close(self) -> None:
        """Waits for the last save and lets go of the directory."""
        try:
            self.wait()
        finally:
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """The newest step that is whole, None without one."""
        return self._newest()[0]

    def best_step(self) -> int | None:
        """The whole step with the highest metric (the newest of equal ones), None if none was ranked."""
        ranked = [(m.metric, m.step) for m in self._readable(manifest.steps(self.directory)) if m.metric is not None]
        return next((step for _, step in sorted(ranked, reverse=True) if self._problem(step) is None), None)

    def report(self) -> tuple[str, ...]:
        """One line for each checkpoint that is newer than the newest whole one, and what is wrong with it."""
        return self._newest()[1]

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """Reads a checkpoint.

        Args:
            abstract_state: tree of `jax.ShapeDtypeStruct`, each with the sharding that its array shall get, which may
                differ from the one it was saved with; arrays serve as well.
            step: which; None = the newest whole one.

        Raises:
            CheckpointError: there is none, the given one is not whole, or it holds other arrays.
        """
        self.wait()
        newest, skipped = self._newest()
        if step is None:
            step = newest
        else:
            self._require_whole(step)
            skipped = ()
        if step is None:
            hint = "; ".join(skipped) or "the folder holds no checkpoint"
            raise CheckpointError(f"nothing to resume from in {self.directory}: {hint}")
        wanted = {name: _abstract(leaf) for name, leaf in named_leaves(abstract_state).items()}
        _require_same(wanted, manifest.read(self.directory / str(step)), self.directory / str(step))
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), host=ocp.args.JsonRestore())
        try:
            found = self._open().restore(step, args=arguments)
        except Exception as error:
            raise CheckpointError(f"step {step} in {self.directory} can't be read: {error}") from error
        leaves = [found["state"][name] for name in wanted]
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        return Restored(step, state, found["host"], skipped)

    def restore_host(self, step: int | None = None) -> dict[str, Any]:
        """The host's state of a checkpoint without its arrays; arguments and errors as in `restore`."""
        self.wait()
        step = self.latest_step() if step is None else step
        if step is None:
            raise CheckpointError(f"there is no whole checkpoint in {self.directory}")
        self._require_whole(step)
        found = self._open().restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))
        return dict(found["host"])

    # -- inside ----------------------------------------------------------------------------------------------------

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                create=not self._read_only,
                read_only=self._read_only,
                preservation_policy=_Keep(self),
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            )
            self._manager = ocp.CheckpointManager(self.directory, options=options, item_names=("state", "host"))
        return self._manager

    def _seal(self) -> None:
        """Writes the manifest; Orbax calls this when all files are there and before the folder gets its name."""
        writing = self._writing
        assert writing is not None
        for folder, step in manifest.unfinished(self.directory).items():
            if step == writing.step:
                manifest.write(folder, step, writing.metric, writing.leaves)

    def _make_room(self, step: int) -> None:
        if step in manifest.steps(self.directory):
            if self._problem(step) is None:
                raise CheckpointError(
                    f"step {step} is already saved in {self.directory}; to go on from an older step, "
                    "remove the newer ones first (discard_after)"
                )
            self._remove(step)
        self._sweep()

    def _sweep(self) -> None:
        """Removes what writers left that were stopped; only the run itself writes here."""
        for folder in manifest.unfinished(self.directory):
            shutil.rmtree(folder, ignore_errors=True)

    def _remove(self, step: int) -> None:
        self._whole.discard(step)
        shutil.rmtree(self.directory / str(step))
        if self._manager is not None:
            self._manager.reload()

    def _failed(self, error: Exception) -> CheckpointError:
        """Clears away a save that failed, so that a later one starts afresh."""
        step = self._writing.step if self._writing else None
        self._writing, self._manager = None, None
        self._sweep()
        latest = self.latest_step()
        good = f"step {latest} is intact" if latest is not None else "there is no earlier checkpoint"
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return CheckpointError(
            f"could not save step {step} in {self.directory}: {why}; {good}. Is the disk full "
            f"({shutil.disk_usage(self.directory).free >> 20} MiB free) or not writable?"
        )

    def _problem(self, step: int) -> str | None:
        """Why a step is not whole; a step that was found whole once is not read again."""
        if step in self._whole:
            return None
        reason = manifest.problem(self.directory / str(step))
        if reason is None:
            self._whole.add(step)
        return reason

    def _require_whole(self, step: int) -> None:
        steps = manifest.steps(self.directory)
        if step not in steps:
            there = f"there are: {', '.join(map(str, steps))}" if steps else "there are none at all"
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.directory}; {there}")
        if (reason := self._problem(step)) is not None:
            raise CheckpointError(f"step {step} in {self.directory} is incomplete: {reason}; choose another step")

    def _newest(self) -> tuple[int | None, tuple[str, ...]]:
        """The newest whole step, and what is wrong with those after it."""
        problems = dict.fromkeys(manifest.unfinished(self.directory).values(), "its writer was stopped")
        if self._writing is not None:
            problems.pop(self._writing.step, None)
        newest = None
        for step in reversed(manifest.steps(self.directory)):
            reason = self._problem(step)
            if reason is None:
                newest = step
                break
            problems[step] = reason
        newer = sorted((step for step in problems if newest is None or step > newest), reverse=True)
        return newest, tuple(f"step {step} is incomplete: {problems[step]}" for step in newer)

    def _readable(self, steps: Sequence[int]) -> list[manifest.Manifest]:
        """Manifests of the steps whose files have the right sizes."""
        folders = [self.directory / str(step) for step in steps]
        return [manifest.read(folder) for folder in folders if manifest.problem(folder, checksums=False) is None]

    def _kept(self, steps: Sequence[int]) -> set[int]:
        """Steps to keep once the one that is being written is whole."""
        last, best = self._keep
        found = {m.step: m.metric for m in self._readable(steps)}
        if self._writing is not None:
            found[self._writing.step] = self._writing.metric
        ranked = sorted(((metric, step) for step, metric in found.items() if metric is not None), reverse=True)
        return {*sorted(found)[-last:], *(step for _, step in ranked[:best])}


class _Keep(preservation_policy.PreservationPolicy):
    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        kept = self._checkpoints._kept([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their path, such as `params/layers/wq`; independent of the classes of its nodes.

    Raises:
        ValueError: two leaves have the same path.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two arrays of the state have the same path; rename one of the keys that holds a '/'")
    return named


def _copied(leaf: Any) -> jax.Array:
    """A copy where the host's memory is the device's: there a write in the background would read the donated buffer.

    On other devices Orbax moves the bytes to the host before `save` returns.
    """
    array = jnp.asarray(leaf)
    if not _on_host(array):
        return array
    return jax.device_put(array, array.sharding, may_alias=False)  # unlike jnp.copy it compiles nothing


def _on_host(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _require_json(host: Mapping[str, Any]) -> None:
    try:
        same = json.loads(json.dumps(dict(host))) == dict(host)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the host's state can't be saved as JSON: {error}") from error
    if not same:
        raise CheckpointError(
            "the host's state would come back changed from JSON: use texts as keys, lists instead of tuples, no NaN"
        )


def _require_same(wanted: Mapping[str, Any], saved: manifest.Manifest, folder: Path) -> None:
    """Raises if the checkpoint holds other arrays than the run needs."""
    problems = [f"{name} is not in it" for name in wanted if name not in saved.leaves]
    problems += [f"{name} is not needed" for name in saved.leaves if name not in wanted]
    for name, leaf in wanted.items():
        here = tuple(leaf.shape), str(leaf.dtype)
        if name in saved.leaves and saved.leaves[name] != here:
            problems.append(f"{name} is {saved.leaves[name]} there and {here} here")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{folder} was saved by another model or optimizer: {'; '.join(problems[:5])}{more}; "
            "resume with the configuration it was saved with (config.yaml in the run folder)"
        )
