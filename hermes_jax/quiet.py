"""What libraries say while nothing is wrong that the user could mend; errors reach the user in our own words."""

import logging
import os


def quiet_libraries() -> None:
    """Before jax is imported: no start-up notes of XLA, no tracebacks that Orbax logs beside the error it raises."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("absl").setLevel(logging.CRITICAL)
