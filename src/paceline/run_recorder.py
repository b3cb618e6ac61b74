"""The recorder of a run: its folder, its event log and, on the leader, the live view and the closing verdict."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.observe import EventLog, make_view, new_run_dir, read_log, verdict
from paceline.observe.log.run_folder import FolderInUse, FolderLock, lock_folder, log_file
from paceline.observe.words.numbers import wrapped
from paceline.transport import Transport

logger = logging.getLogger("paceline")


class RunRecorder:
    """The recorder: the leader's writes the log and feeds the view, the others' pass warnings to ``logging``."""

    def __init__(
        self,
        transport: Transport,
        *,
        name: str | None,
        run_dir: str | Path | None,
        quiet: bool,
        settings: Mapping[str, Any],
        device: torch.device,
        emulated: str | None,
    ) -> None:
        self._transport = transport
        self._log: EventLog | None = None
        self._closed = False
        name = os.environ.get("PACELINE_NAME") or name or Path(sys.argv[0]).stem or "run"
        # In an elastic fleet any worker may have to continue the log.
        first = transport.shard == 0
        folder, problem = _make_folder(run_dir, name) if first and (self._leads or transport.elastic) else (None, None)
        self._lock: FolderLock | None = None
        if self._leads and folder is not None:
            try:
                self._lock = lock_folder(folder, fleet=self._fleet)
            except FolderInUse as error:
                problem = str(error)
        mine = {
            "rank": transport.rank,
            **({"id": transport.workers[transport.rank]} if transport.elastic else {}),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(device),
            "emulated": emulated,
            **({"processes": transport.shards} if transport.shards > 1 else {}),
            "folder": str(folder),
            "problem": problem,
        }
        everybody = transport.gather("the run's folder", mine)
        if everybody[0]["problem"]:
            raise ValueError(everybody[0]["problem"])
        self.run_dir = folder if transport.elastic and folder is not None else Path(everybody[0]["folder"])
        self.run_dir = transport.once("the run's folder, as it is", lambda: self.run_dir)
        self.run_id = self.run_dir.name
        self._quiet, self._under_launcher = quiet, bool(os.environ.get("PACELINE_LAUNCHER"))
        self._view = make_view(quiet=quiet or not self._leads or self._under_launcher)
        self._logs_warnings = quiet and not self._under_launcher
        keys = ("rank", "id", "host", "pid", "device", "emulated", "processes")
        self._run = {
            "run_id": self.run_id,
            "name": name,
            **settings,
            "transport": transport.name,
            "backend": transport.backend,
            "workers": [{key: facts[key] for key in keys if key in facts} for facts in everybody],
            **({"places": places} if (places := transport.places()) else {}),
            "started": transport.clock(),
            "torch": torch.__version__,
            "paceline": __version__,
            "python": platform.python_version(),
        }
        if self._leads:
            self._open_log(goes_on=False)

    @property
    def _leads(self) -> bool:
        first = self._transport.rank == 0 and self._transport.shard == 0
        return first and not getattr(self._transport, "outside", False)

    @property
    def _prints_verdict(self) -> bool:
        return self._leads and not self._quiet and not self._under_launcher

    @property
    def _fleet(self) -> str | None:
        """The roster's address, which identifies an elastic fleet to all its workers."""
        return os.environ.get("PACELINE_ROSTER", "").partition("#")[0] if self._transport.elastic else None

    def _open_log(self, *, goes_on: bool) -> None:
        """Begin the log or, when the previous leader is gone, continue it."""
        log = log_file(self.run_dir)
        begun = goes_on and log.exists() and log.stat().st_size > 0  # the previous leader may have written nothing
        if self._lock is None:  # a previous leader that is cut off may hold the lock: the run goes on without it
            with suppress(FolderInUse):
                self._lock = lock_folder(self.run_dir, fleet=self._fleet, patience_s=0.0)
        self._log = EventLog(self.run_dir, clock=self._transport.clock, goes_on=begun)
        if not begun:
            self._view.show(self._log.write("run", **self._run))

    def go_on_in(self, folder: Path) -> None:
        """Use the run's folder, if it can be reached from here; called on a worker that joins a run."""
        if log_file(folder).exists():
            self.run_dir, self.run_id = folder, folder.name

    def event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write an event into the log, on the leader; warnings that no view shows go to ``logging``."""
        warning = event == "note" and fields["level"] == "warning"
        if self._log is not None and not self._leads:  # another worker leads and writes the log now
            self._close_log()
        elif self._log is None and not self._closed and self._leads:
            self._open_log(goes_on=True)
        if self._log is not None:
            self._view.show(self._log.write(event, **fields))
            if warning and self._logs_warnings:
                logger.warning(self._form_of_warnings(), fields["text"])
        elif warning and not fields.get("everywhere") and self._transport.shard == 0:
            logger.warning(self._form_of_warnings(), fields["text"])

    @staticmethod
    def _form_of_warnings() -> str:
        """Return the format of a warning: where nobody has set ``logging`` up, its level is not shown."""
        return "%s" if logger.hasHandlers() else "warning: %s"

    def flush(self) -> None:
        """Write all events so far; called before the fleet's last call, after which nobody would write them instead."""
        if self._log is not None:
            self._log.flush()

    def close(self, error: BaseException | None) -> None:
        self._closed = True
        if self._log is None:
            return
        if self._transport.elastic and (error is not None or not self._leads):  # the others go on without this worker
            self._close_log()
            self._view.close()
            return
        if isinstance(error, SystemExit) and not error.code:  # the script ended itself, without an error
            error = None
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = "finished" if error is None else "interrupted" if interrupted else "error"
        self.event("end", {"reason": reason, "text": str(error) if error else ""})
        self._close_log()
        self._view.close()
        if self._prints_verdict and error is None:
            self._print_verdict()

    def _close_log(self) -> None:
        assert self._log is not None
        self._log.close()
        self._log = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _print_verdict(self) -> None:
        try:
            run = read_log(self.run_dir)
        except ValueError:  # no log could be written, which was warned of
            return
        if run.records:
            text = wrapped(verdict(run).text, sys.stderr)
            print(f"\n{text}\nThe run's log: {self.run_dir}", file=sys.stderr, flush=True)


def _make_folder(run_dir: str | Path | None, name: str) -> tuple[Path | None, str | None]:
    """Make the run's folder, and return it, or None and what is wrong."""
    asked = os.environ.get("PACELINE_RUN_DIR") or run_dir
    try:
        folder = Path(asked) if asked else new_run_dir(Path("runs"), name)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return (
            None,
            f"the run's folder {asked or Path('runs').absolute()} cannot be written ({why}): give another run_dir",
        )
    return folder, None
