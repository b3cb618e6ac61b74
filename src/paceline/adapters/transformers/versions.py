"""Which versions of Transformers the adapter is for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

INSTALL = "pip install 'paceline[transformers]'"
_COUNTING = ("set_initial_training_values", "get_batch_samples", "_get_num_items_in_batch", "_track_num_input_tokens")
HOOKS = (*_COUNTING, "create_scheduler", "evaluation_loop", "prediction_step", "_save_rng_state", "_load_best_model")
"""Methods of the Trainer that the adapter overrides or calls; without one it would train another way, unseen."""


def check_installed() -> None:
    """Raise ImportError with what to install, unless Transformers 5 and Accelerate are there."""
    for package in ("transformers", "accelerate"):
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ImportError(f"paceline.adapters.transformers needs {package}: {INSTALL}") from None
        if package == "transformers":
            check_version(found)


def check_version(found: str) -> None:
    """Raise ImportError unless it is a version 5.

    >>> check_version("5.2.0")
    >>> check_version("4.57.1")
    Traceback (most recent call last):
    ImportError: paceline.adapters.transformers is for Transformers 5, and 4.57.1 is installed: pip install 'paceline[transformers]'
    """  # noqa: E501
    if found.split(".")[0] != "5":
        raise ImportError(f"paceline.adapters.transformers is for Transformers 5, and {found} is installed: {INSTALL}")


def check_hooks(trainer: type) -> None:
    """Raise ImportError when this Trainer lacks what the adapter needs."""
    lacking = [name for name in HOOKS if not hasattr(trainer, name)]
    if lacking:
        raise ImportError(
            f"the Trainer of Transformers {version('transformers')} has no {lacking[0]}, which PacelineTrainer needs: "
            "install the newest Transformers 5"
        )
