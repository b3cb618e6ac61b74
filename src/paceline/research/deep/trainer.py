"""The background trainer: a process of its own that reads a series, writes a model and ends.

    python -m paceline.research.deep.trainer FOLDER UPDATES PARENT

reads FOLDER/series.npz and writes FOLDER/model.pt. It is as nice as can be and uses one thread. When the process
PARENT that started it is gone, it removes the folder and ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

import numpy as np

NICE = 19


def main(location: str, updates: str, parent: str) -> None:
    folder = Path(location)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICE)
    from paceline.research.deep.fit import Training, fit
    from paceline.research.deep.model import save_model
    from paceline.research.deep.recordings import recording

    def still_wanted(done: int, total: int) -> None:
        if os.getppid() != int(parent):
            shutil.rmtree(folder, ignore_errors=True)
            sys.exit("the run that wanted this model has ended")

    with np.load(folder / "series.npz", allow_pickle=False) as content:
        parts = range(len(content.files) // 2)
        recordings = [recording(f"part {i}", content[f"seconds{i}"], content[f"late{i}"]) for i in parts]
    model = fit(recordings, training=Training(updates=int(updates)), progress=still_wanted)
    save_model(model, folder / "model.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
